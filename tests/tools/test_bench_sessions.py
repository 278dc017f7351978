"""The bench of the session server, in small, by a played engine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "rollout")]

import bench_sessions  # noqa: E402
import tiny_models  # noqa: E402


def test_each_way_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    small = "--played --conversations 3 --turns 2 --tokens 4 --rounds 2".split()
    assert bench_sessions.main([str(tmp_path), *small]) == 0
    said = capsys.readouterr().out
    assert sorted(re.findall(r"^round (\d), (by the \w+)", said, re.MULTILINE)) == [
        (number, way) for number in "12" for way in ("by the loop", "by the server")
    ]
    lines = said.splitlines()[4:]
    assert [line.partition(",")[0] for line in lines[::2]] == ["seconds", "seconds of this process"]
    assert all("6 requests a round" in line for line in lines[::2])
    for rounds in lines[::2]:
        of_way = re.findall(r"'(by the \w+)': \[(.*?)\]", rounds)
        assert [(way, len(took.split(","))) for way, took in of_way] == [("by the loop", 2), ("by the server", 2)]
    assert all("by the loop" in line and "by the server" in line for line in lines[1::2])
