"""Run a script, or a function of `tools/`, as the ranks of a job on this machine, for tools that measure."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.config.command_line import Parser, run_cli
from megarl.processes.children import die_with_parent
from megarl.utils.addresses import free_port

ROOT = Path(__file__).resolve().parents[1]
PARENT = "TOOL_PID"
"""Environment variable with the id of the program that starts the ranks."""


def run(
    command: Sequence[str],
    world: int,
    timeout: float = 1800.0,
    root: Path = ROOT,
    watch: Callable[[Sequence[int]], None] | None = None,
    environment: Mapping[str, str] | None = None,
    rank_settings: Callable[[int], tuple[Sequence[str], Mapping[str, str]]] = lambda rank: ((), {}),
) -> Any:
    """Start `world` processes of a Python command line, and return the result of rank 0, which it prints as `RESULT
    {json}`. When a rank fails, the others are killed, and the program exits with the end of its output.

    root: the checkout whose code they run. watch: called with their ids; must return at once. environment: of all
    ranks. rank_settings: by rank, a command that starts the rank's command, and an environment.
    """
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "WORLD_SIZE": str(world)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), PARENT: str(os.getpid())}
    shared |= environment or {}
    ranks: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world)]
        for rank, file in enumerate(files):
            prefix, settings = rank_settings(rank)
            line = [*prefix, sys.executable, "-W", "ignore", *command]
            env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **settings}
            ranks.append(subprocess.Popen(line, env=env, stdout=file, stderr=subprocess.STDOUT, text=True))
        if watch is not None:
            watch([process.pid for process in ranks])
        deadline = time.monotonic() + timeout
        try:
            while None in (codes := [process.poll() for process in ranks]) and not any(codes):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        outputs = []
        for file in files:
            file.seek(0)
            outputs.append(file.read())
    lines = [line for line in outputs[0].splitlines() if line.startswith("RESULT ")]
    if lines and not any(codes) and None not in codes:
        return json.loads(lines[-1].removeprefix("RESULT "))
    raise SystemExit(f"the ranks failed: {describe_failure(codes, outputs, timeout)}")


def describe_failure(codes: Sequence[int | None], outputs: Sequence[str], timeout: float) -> str:
    """Return why the ranks with these exit statuses, None for those that still ran, have no result."""
    # The others may fail because the killed one is missing, so name that.
    for rank, code in sorted(enumerate(codes), key=lambda item: item[1] or 0):
        if code and code < 0:
            return f"rank {rank} was ended by signal {-code}, perhaps for lack of memory"
        if code:
            return f"rank {rank} exited with {code}\n{outputs[rank][-4000:]}"
    if None in codes:
        return f"they were not done after {timeout:g} s"
    return f"rank 0 printed no result\n{outputs[0][-4000:]}"


def run_function(function: str, world: int, **arguments: Any) -> Any:
    """Run `module:name` as the ranks, with the arguments that are no options of `run`; return what rank 0 returns.
    Everything has to be JSON."""
    names = ("timeout", "root", "watch", "environment", "rank_settings")
    options = {name: arguments.pop(name) for name in names if name in arguments}
    return run([__file__, function, json.dumps(arguments)], world, **options)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("function", help="module:name, started by other tools")
    parser.add_argument("arguments", help="JSON, by name")
    options = parser.parse_args()
    if PARENT not in os.environ:
        raise ConfigError("other tools start this program; start one of them, such as tools/bench.py")
    die_with_parent(int(os.environ[PARENT]))
    module, _, name = options.function.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(options.arguments))
    if os.environ["RANK"] == "0":
        print("RESULT " + json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
