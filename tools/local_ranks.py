"""Run a script as the ranks of a job on this machine, for tools that measure; the script prints one line `RESULT
{json}`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.utils.addresses import free_port

ROOT = Path(__file__).resolve().parents[1]


def run(
    command: Sequence[str],
    world: int,
    timeout: float = 1800.0,
    root: Path = ROOT,
    watch: Callable[[Sequence[int]], None] | None = None,
) -> Any:
    """Start `world` processes of a Python command line. Return the result of the first one; exit the program if it has
    none. root: the checkout whose code they run. watch: called with their ids; must return at once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "WORLD_SIZE": str(world)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    if watch is not None:
        watch([process.pid for process in ranks])
    try:
        output, _ = ranks[0].communicate(timeout=timeout)
    finally:
        for process in ranks:
            if ranks[0].returncode != 0:  # the others may wait for it forever
                process.kill()
            process.wait()
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{' '.join(command)} did not come to its end:\n{output[-4000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))
