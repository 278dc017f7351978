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
    command = [sys.executable, "-W", "ignore", "tools/bench_reshard.py", "--ranks", "4", "--repeats", "1"]
    command += ["--hidden", "64", "--json", str(tmp_path / "result.json")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stderr
    (actual,) = json.loads((tmp_path / "result.json").read_text())
    assert (actual["ranks"], actual["nodes"], tuple(actual["ways"])) == (4, 1, WAYS)
    for way, result in actual["ways"].items():
        assert not result.get("problem") and not result["wrong"], (way, result)
        assert len(result["seconds"]) == 1 and result["seconds"][0] > 0
        assert f"  {way} " in process.stdout
    # TCP and the barriers of the measurement add bytes, more than a tenth with 8.6 MiB only if something is sent twice.
    sent = {way: result["wire_mib"] / actual["bound_mib"] for way, result in actual["ways"].items()}
    assert all(1 <= sent[way] < 1.1 for way in ("reshard", "changes", "changes-dense", "merged", "experts")), sent
    assert sent["adapters"] < 0.5
    assert 2 < sent["external"] < 3 < sent["gather"], sent  # an external engine gets everything over the wire, too
