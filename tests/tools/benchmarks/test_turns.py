"""`bench.py turns`: sampled workloads and pure tool waiting, without an engine."""

from __future__ import annotations

from argparse import Namespace

import pytest
from benchmarks import turns

pytestmark = pytest.mark.alone


def test_tool_wait_matches_hand_computed_values() -> None:
    calls = [[1.0, 2.0, 1.0], [3.0, 0.0, 0.5], [0.0, 0.0, 4.5]]
    assert turns.tool_wait_seconds(calls) == (3.0 + 2.0 + 4.5, 4.5)


def test_workload_is_reproducible_with_the_requested_mean() -> None:
    options = Namespace(turns=400, tokens=16, tool_s=0.5, even=False)
    seconds, tokens = turns.tool_seconds(options, "1/2"), turns.lengths(options, 7)
    assert seconds == turns.tool_seconds(options, "1/2") != turns.tool_seconds(options, "1/3")
    assert tokens == turns.lengths(options, 7) != turns.lengths(options, 8)
    assert (len(seconds), len(tokens)) == (399, 400) and 2 <= min(tokens) and max(tokens) <= 64
    assert sum(seconds) / 399 == pytest.approx(0.5, rel=0.2) and sum(tokens) / 400 == pytest.approx(16, rel=0.2)


def test_even_workload_gains_nothing() -> None:
    options = Namespace(turns=3, tokens=16, tool_s=0.5, even=True)
    assert turns.lengths(options, 1) == [16, 16, 16]
    assert turns.tool_wait_seconds([turns.tool_seconds(options, seed) for seed in range(9)]) == (1.0, 1.0)
