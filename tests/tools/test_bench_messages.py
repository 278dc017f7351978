"""`bench_messages`, which verifies what arrives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]


def test_measures_messages_and_gathers() -> None:
    command = [sys.executable, "-W", "ignore", "tools/bench_messages.py", "--mb", "1", "--ranks", "2", "--repeats", "1"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stderr
    assert "post over plain copy" in process.stdout and "one rank 8 MB" in process.stdout
