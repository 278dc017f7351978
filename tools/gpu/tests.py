"""The tests that need a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpu.found import CheckResult

ROOT = Path(__file__).resolve().parents[2]


def tests(device: str) -> CheckResult:
    """Passes if at least one test ran and none failed."""
    # Only files with such tests: others import packages that a machine for these checks need not have.
    files = [
        str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "@pytest.mark.gpu" in path.read_text()
    ]
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "--rootdir", ".", "-q", "-m", "gpu", *files]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (process.stdout.strip() or process.stderr.strip() or "no output").splitlines()
    passed = process.returncode == 0 and "passed" in lines[-1]
    return CheckResult("passed" if passed else "failed", lines[-1].strip("= ")[:300])
