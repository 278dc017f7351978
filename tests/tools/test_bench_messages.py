"""The benchmark of messages runs, and what arrives is right: it says so itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_messages_and_gathers() -> None:
    command = [sys.executable, "-W", "ignore", "tools/bench_messages.py", "--mb", "1", "--ranks", "2", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "post over plain copy" in done.stdout and "one rank 8 MB" in done.stdout
