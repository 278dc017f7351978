"""The benchmark runs, and its three ways bring the right values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_three_ways_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "tools/bench_reshard.py", "--ranks", "2", "--repeats", "1"]
    command += ["--hidden", "64", "--json", str(tmp_path / "result.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    actual = json.loads((tmp_path / "result.json").read_text())["2"]
    assert set(actual) == {"reshard", "gather", "megatron"}
    for way, result in actual.items():
        assert not result.get("problem") and not result["wrong"], (way, result)
        assert result["seconds"][0] > 0
        assert f"  {way} " in done.stdout
    # What both ways that know what is there already send is the same; a gather sends more.
    assert actual["reshard"]["wire_mib"] < actual["gather"]["wire_mib"]
