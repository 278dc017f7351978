"""What the bench of turns draws, and what waiting alone takes by it; no engine is started."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import bench_turns  # noqa: E402

pytestmark = pytest.mark.alone


def test_waiting_alone_by_hand() -> None:
    calls = [[1.0, 2.0, 1.0], [3.0, 0.0, 0.5], [0.0, 0.0, 4.5]]
    assert bench_turns.tool_wait_seconds(calls) == (3.0 + 2.0 + 4.5, 4.5)


def test_both_ways_draw_the_same_and_about_the_average() -> None:
    options = Namespace(turns=400, tokens=16, tool_s=0.5, even=False)
    seconds, tokens = bench_turns.seconds_of(options, "1/2"), bench_turns.lengths(options, 7)
    assert seconds == bench_turns.seconds_of(options, "1/2") != bench_turns.seconds_of(options, "1/3")
    assert tokens == bench_turns.lengths(options, 7) != bench_turns.lengths(options, 8)
    assert (len(seconds), len(tokens)) == (399, 400) and 2 <= min(tokens) and max(tokens) <= 64
    assert sum(seconds) / 399 == pytest.approx(0.5, rel=0.2) and sum(tokens) / 400 == pytest.approx(16, rel=0.2)


def test_evenly_nothing_is_won_by_waiting() -> None:
    options = Namespace(turns=3, tokens=16, tool_s=0.5, even=True)
    assert bench_turns.lengths(options, 1) == [16, 16, 16]
    assert bench_turns.tool_wait_seconds([bench_turns.seconds_of(options, seed) for seed in range(9)]) == (1.0, 1.0)
