"""`bench.py sessions` on small settings with a mocked engine."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import bench
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "rollout"))

import tiny_models  # noqa: E402

pytestmark = pytest.mark.nightly


def test_times_both_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    options = "--played --conversations 3 --turns 2 --tokens 4 --rounds 2".split()
    assert bench.main(["sessions", str(tmp_path), *options, "--json", str(tmp_path / "result")]) == 0
    output = capsys.readouterr().out
    methods = ["by the loop", "by the server"]
    assert sorted(re.findall(r"^round (\d), (by the \w+)", output, re.MULTILINE)) == [
        (number, method) for number in "12" for method in methods
    ]
    assert "6 requests a round" in output
    loop, server = json.loads((tmp_path / "result").read_text())["rows"]
    assert [loop["way"], server["way"]] == methods
    assert all(len(row["samples"][unit]) == 2 for row in (loop, server) for unit in ("seconds", "processor s"))
    extra = server["seconds"] - loop["seconds"]
    assert loop["server, ms more a request"] == pytest.approx(1000 * extra / 6)
    assert server["server, ms more a request"] == 0 and server["server, times"]["median"] == 1
