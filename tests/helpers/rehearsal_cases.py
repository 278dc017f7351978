"""Runs the scripts of tests/rehearse that play several cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_cases(script: str, cases: Mapping[str, Any], folder: Path, timeout: float) -> dict[str, Any]:
    """Return what a script prints of each case, by name. timeout: seconds."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests/rehearse" / script), str(file)],
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT ")[2])
    return results
