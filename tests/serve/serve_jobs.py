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

START_S = 300


@contextmanager
def serve(host: str, model: Path, run_dir: Path, *overrides: str, key: str = "") -> Iterator[str]:
    """Give the address of a server. host: socket of an engine host."""
    address = run_dir / "serve_url"
    address.unlink(missing_ok=True)
    settings = [f"model.path={model}", f"run.dir={run_dir}", "options.port=0", "rollout.max_context=128"]
    command = [
        sys.executable,
        "-m",
        "megarl.serve",
        "configs/serve/quickstart.yaml",
        *settings,
        "rollout.max_new_tokens=64",
    ]
    environment = with_host(host) | {"MEGARL_SERVE_API_KEY": key}
    log = run_dir.with_name(f"{run_dir.name}.log")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, *overrides], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        deadline = time.monotonic() + START_S
        while not address.exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield address.read_text().strip()
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(60)
