"""Start the server on a tiny model, as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training_run import ROOT, with_host

from megarl.utils.addresses import free_port

START_S = 300


@contextmanager
def serve(host: str, model: Path, run_dir: Path, *overrides: str, key: str = "", nodes: int = 1) -> Iterator[str]:
    """Give the address of a server.

    host: socket of an engine host. nodes: launchers to start, each with two ranks that are a node of their own.
    """
    address = run_dir / "serve_url"
    address.unlink(missing_ok=True)
    settings = [f"model.path={model}", f"run.dir={run_dir}", "options.port=0", "rollout.max_context=128"]
    settings += ["rollout.max_new_tokens=64", *overrides]
    command, port = ["-m", "megarl.serve", "configs/serve/quickstart.yaml"], str(free_port())
    environment = with_host(host) | {"MEGARL_SERVE_API_KEY": key}
    launchers: list[list[str]] = [[]]
    if nodes > 1:
        launcher = ["-m", "megarl.torchrun", "--nnodes", str(nodes), "--nproc-per-node", "2"]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", port]
        launchers = [[*launcher, "--node-rank", str(node)] for node in range(nodes)]
        settings += [f"parallel.world_size={2 * nodes}", "parallel.ranks_per_node=2"]
        environment |= {"MEGARL_SECRET": "a" * 32, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = run_dir.with_name(f"{run_dir.name}.log")
    with log.open("ab") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, *launcher, *command, *settings],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            for launcher in launchers
        ]
    try:
        deadline = time.monotonic() + START_S
        while not address.exists():
            is_running = all(process.poll() is None for process in processes)
            assert is_running and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield address.read_text().strip()
        assert all(process.poll() is None for process in processes), log.read_text()[-3000:]
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGTERM)
        for process in processes:
            process.wait(60)
