"""`bench_sessions` on small settings with a fake engine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "rollout")]

import bench_sessions  # noqa: E402
import tiny_models  # noqa: E402

pytestmark = pytest.mark.nightly


def test_times_both_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    options = "--played --conversations 3 --turns 2 --tokens 4 --rounds 2".split()
    assert bench_sessions.main([str(tmp_path), *options]) == 0
    output = capsys.readouterr().out
    assert sorted(re.findall(r"^round (\d), (by the \w+)", output, re.MULTILINE)) == [
        (number, method) for number in "12" for method in ("by the loop", "by the server")
    ]
    lines = output.splitlines()[4:]
    assert [line.partition(",")[0] for line in lines[::2]] == ["seconds", "seconds of this process"]
    assert all("6 requests a round" in line for line in lines[::2])
    for rounds in lines[::2]:
        seconds_by_method = re.findall(r"'(by the \w+)': \[(.*?)\]", rounds)
        assert [(method, len(seconds.split(","))) for method, seconds in seconds_by_method] == [
            ("by the loop", 2),
            ("by the server", 2),
        ]
    assert all("by the loop" in line and "by the server" in line for line in lines[1::2])
