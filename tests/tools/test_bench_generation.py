"""`bench_generation` on small settings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import bench_generation  # noqa: E402

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("turns", ["1", "2"])
def test_strategies_complete_the_same_number_of_groups(turns: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--steps 2 --prompts 4 --samples 2 --concurrency 2 --tokens 20 --tool-s 0.01 --engines 2".split()
    result = bench_generation.main([*options, "--turns", turns])
    assert [groups for _, _, groups, _, _ in result] == [8, 8, 8]
    assert all(0 < idle < 1 for _, idle, *_ in result)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:24].strip() for line in lines] == ["even slices", "queue", "queue and over-sampling"]
