"""Start `tools/engine_pool.py serve` for a run of a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

TOOL = str(Path(__file__).resolve().parent.parent / "tools/engine_pool.py")


def start(
    config: str, address: str, out: Path, settings: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start an engine that listens at `address`, and return its process once it is ready."""
    command = [sys.executable, TOOL, "serve", config, *settings]
    command += ["--listen", address, "--out", str(out), "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready"):
            return process
    raise AssertionError("".join(lines))


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@contextmanager
def serve(
    config: str, address: str, out: Path, settings: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Have an engine at `address` within the block."""
    process = start(config, address, out, settings, environment)
    try:
        yield
    finally:
        end(process)
