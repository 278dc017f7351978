"""Fixtures that the tests share: ranks as processes, tiny models, engines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(world: int, script: str, *args: str, timeout: float = 300.0) -> list[dict[str, Any]]:
    """Run `world` processes of a script as the ranks of one job; each prints one line `RESULT {json}`."""
    env = dict(os.environ, WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    env.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(ROOT / script), *args],
            env=dict(env, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + timeout
    outputs: list[str] = []
    failed: list[str] = []
    for rank, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            failed.append(f"rank {rank} ran past {timeout} s")
            for other in processes:
                other.kill()
            output, _ = process.communicate()
        outputs.append(output)
        if process.returncode:
            failed.append(f"rank {rank} exited with {process.returncode}")
            for other in processes:
                other.terminate()
    if failed:
        tails = "\n".join(f"--- rank {rank}\n{output[-3000:]}" for rank, output in enumerate(outputs))
        pytest.fail(f"{script} {' '.join(args)}: {'; '.join(failed)}\n{tails}")
    results = []
    for rank, output in enumerate(outputs):
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        assert lines, f"rank {rank} of {script} printed no RESULT line:\n{output[-3000:]}"
        results.append(json.loads(lines[-1].removeprefix("RESULT ")))
    return results


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[dict[str, Any]]]:
    return start_ranks


@pytest.fixture(scope="session")
def units(run_ranks: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    """One process for all checks that need Megatron but no second rank: `ranks_units.py`, run once.

    Megatron is never imported into pytest's own process, because the CPU shim patches torch for good.
    """
    return run_ranks(1, "tests/megatron/ranks_units.py")[0]


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Megatron's CPU shim patches torch for good, and transformers then computes wrong numbers in every later test."""
    assert "megarl.megatron" not in sys.modules, f"{item.nodeid} imports Megatron into pytest's own process"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped on a machine without one."""
    if not Path("/dev/nvidia0").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
