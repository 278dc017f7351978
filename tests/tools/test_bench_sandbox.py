"""`bench_sandbox`: its table, CPU accounting and backend checks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import bench_sandbox  # noqa: E402

from megarl.config import ConfigError  # noqa: E402

pytestmark = pytest.mark.nightly


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap on this machine")
def test_compares_sandboxed_and_bare_runs() -> None:
    """Runs in a separate process, because the tool adopts and reaps orphans."""
    command = [sys.executable, "tools/bench_sandbox.py", "--boxes", "4", "--workers", "1", "2"]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    if process.returncode == 2 and "does not work on this machine" in process.stderr:
        pytest.skip(f"there can be no boxes here: {process.stderr}")
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    rows = [line.split() for line in lines]
    assert lines[0].startswith("sandbox bubblewrap: ")
    assert rows[1] == ["p50", "ms", "p95", "ms", "processor", "ms"]
    assert [row[0] for row in rows[2:5]] == ["sandbox", "bare", "ratio"] and all(len(row) == 4 for row in rows[2:5])
    assert float(rows[4][1]) == pytest.approx(float(rows[2][1]) / float(rows[3][1]), rel=0.1)
    assert [row[0] for row in rows[5:]] == ["1", "2"]
    for row in rows[5:]:
        assert row[4:6] == ["boxes/s,", "bare"] and row[7] == "ratio"
        assert float(row[8]) == pytest.approx(float(row[3]) / float(row[6].rstrip(",")), rel=0.1)


def test_cpu_seconds_grow() -> None:
    start = bench_sandbox.cpu_seconds(os.getpid())
    while bench_sandbox.cpu_seconds(os.getpid()) < start + 0.05:
        pass


def test_rejects_other_backends_and_zero_boxes() -> None:
    with pytest.raises(ConfigError, match="must be bubblewrap here"):
        bench_sandbox.main(["sandbox.backend=none"])
    with pytest.raises(ConfigError):
        bench_sandbox.main(["--boxes", "0"])
