"""`bench_kernels` with and without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]


def run_bench(*arguments: str, hide_gpus: bool = False) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=str(ROOT)) | ({"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {})
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools/bench_kernels.py"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)


def test_requires_a_gpu() -> None:
    process = run_bench(hide_gpus=True)
    assert process.returncode == 2
    assert process.stdout == "" and "NVIDIA GPU" in process.stderr and process.stderr.count("\n") == 1


@pytest.mark.gpu
def test_measures_each_kernel() -> None:
    process = run_bench("--gib", "0.25", "--json")
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads(process.stdout)
    assert all(value > 0 for name, value in result.items() if name != "device")
