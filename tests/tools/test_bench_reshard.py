"""`bench_reshard` on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parent.parent.parent


def test_all_methods_transfer_correct_values(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "tools/bench_reshard.py", "--ranks", "2", "--repeats", "1"]
    command += ["--hidden", "64", "--json", str(tmp_path / "result.json")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stderr
    actual = json.loads((tmp_path / "result.json").read_text())["2"]
    assert set(actual) == {"reshard", "changes", "merged", "adapters", "gather", "megatron"}
    for method, result in actual.items():
        assert not result.get("problem") and not result["wrong"], (method, result)
        assert result["seconds"][0] > 0
        assert f"  {method} " in process.stdout
    # A gather also sends what the receiver already has.
    assert actual["reshard"]["wire_mib"] < actual["gather"]["wire_mib"]
