"""`bench_reshard` on four ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parent.parent.parent
WAYS = "reshard", "changes", "changes-dense", "merged", "adapters", "experts", "external", "gather", "megatron"


def test_all_ways_transfer_correct_values(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "tools/bench_reshard.py", "--ranks", "4", "--repeats", "2"]
    command += ["--timeout", "120", "--hidden", "64", "--json", str(tmp_path / "result.json")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stderr
    (actual,) = json.loads((tmp_path / "result.json").read_text())
    assert (actual["ranks"], actual["nodes"], tuple(actual["ways"])) == (4, 1, WAYS)
    for way, result in actual["ways"].items():
        assert not result.get("problem") and not result["wrong"], (way, result)
        assert len(result["seconds"]) == 2 and min(result["seconds"]) > 0
        assert f"  {way} " in process.stdout
    # Loopback has the bytes of other programs, TCP and barriers, too: bounds that only sending twice exceeds.
    sent = {way: result["wire_mib"] / actual["bound_mib"] for way, result in actual["ways"].items()}
    assert all(1 <= sent[way] < 1.8 for way in ("reshard", "changes", "changes-dense", "merged", "experts")), sent
    assert sent["adapters"] < 0.8
    assert sent["external"] > 2 and sent["gather"] > 3, sent  # an external engine gets everything over the wire, too
