"""The tests that need a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpu.found import CheckResult

ROOT = Path(__file__).resolve().parents[2]


def tests(device: str) -> CheckResult:
    """Passes if at least one test ran and none failed."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "--rootdir", ".", "-q", "-m", "gpu", "tests"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (process.stdout + process.stderr).strip().splitlines() or ["no output"]
    passed = process.returncode == 0 and "passed" in lines[-1]
    return CheckResult("passed" if passed else "failed", lines[-1].strip("= ")[:300])
