"""`bench.py reshard` on four ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[3]
WAYS = "reshard", "changes", "changes-dense", "merged", "adapters", "experts", "external", "gather", "megatron"


def test_all_ways_transfer_correct_values(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "tools/bench.py", "reshard", "--ranks", "4", "--repeats", "2"]
    command += ["--timeout", "120", "--hidden", "64", "--json", str(tmp_path / "result.json")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stderr
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert tuple(row["way"] for row in rows) == WAYS
    for row in rows:
        assert row["errors"] == "" and (row["job"]["ranks"], row["job"]["nodes"]) == (4, 1), row
        assert len(row["samples"]["seconds"]) == 2 and min(row["samples"]["seconds"]) > 0
        assert f"  {row['way']} " in process.stdout
    # Loopback has the bytes of other programs, TCP and barriers, too: bounds that only sending twice exceeds.
    sent = {row["way"]: row["of bound"] for row in rows}
    assert all(row["of bound"] == row["wire MiB"] / row["job"]["bound MiB"] for row in rows)
    assert all(1 <= sent[way] < 1.8 for way in ("reshard", "changes", "changes-dense", "merged", "experts")), sent
    assert sent["adapters"] < 0.8
    assert sent["external"] > 2 and sent["gather"] > 3, sent  # an external engine gets everything over the wire, too
