"""The kernels' benchmark says so where it cannot run, and on a GPU reaches its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str, hidden: bool = False) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=str(ROOT)) | ({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools/bench_kernels.py"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)


def test_it_needs_a_gpu() -> None:
    done = bench(hidden=True)
    assert done.returncode == 2
    assert done.stdout == "" and "NVIDIA GPU" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.gpu
def test_it_measures_each_figure() -> None:
    done = bench("--gib", "0.25", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert all(value > 0 for name, value in result.items() if name != "device")
