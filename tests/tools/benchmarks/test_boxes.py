"""`bench.py boxes`: its tables, and the check of the backend."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import bench
import pytest

from megarl.config import ConfigError

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap on this machine")
def test_compares_sandboxed_and_bare_runs() -> None:
    """Runs in a separate process, because the tool adopts and reaps orphans."""
    command = [sys.executable, "tools/bench.py", "boxes", "--boxes", "4", "--workers", "1", "2", "--json"]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    if process.returncode == 2 and "does not work on this machine" in process.stderr:
        pytest.skip(f"there can be no boxes here: {process.stderr}")
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["notes"][0].startswith("sandbox bubblewrap: ")
    bare, sandboxed, *concurrent = result["rows"]
    assert (bare["way"], sandboxed["way"]) == ("bare", "sandbox")
    for row in (bare, sandboxed):
        assert 0 < row["p50, ms"] <= row["p95, ms"] and len(row["samples"]["seconds"]) == 4
    ratios = [a / b for a, b in zip(sandboxed["samples"]["seconds"], bare["samples"]["seconds"], strict=True)]
    assert min(ratios) <= sandboxed["ratio"]["low"] <= sandboxed["ratio"]["median"] <= max(ratios)
    assert [row["at once"] for row in concurrent] == [1, 2]
    assert all(min(row["bare, boxes/s"], row["sandbox, boxes/s"]) > 0 for row in concurrent)


def test_rejects_other_backends_and_zero_boxes() -> None:
    with pytest.raises(ConfigError, match="must be bubblewrap here"):
        bench.main(["boxes", "sandbox.backend=none"])
    with pytest.raises(ConfigError):
        bench.main(["boxes", "--boxes", "0"])
