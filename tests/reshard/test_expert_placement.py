"""Placement of an engine's experts: each has a slot, copies are optimal, and the loads of the ranks are balanced."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.plan.expert_placement import (
    count_copies,
    imbalance,
    initial_placement,
    place_experts,
    rank_loads,
)

pytestmark = pytest.mark.alone


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """(load of each expert, ranks, slots) of a small layer."""
    ranks, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    slots = ranks * per_rank
    load = draw(st.lists(st.integers(0, 100), min_size=1, max_size=slots))
    return load, ranks, slots


def least_largest_load(weights: Sequence[float], ranks: int) -> float:
    """Return the least possible load of the most loaded rank, by trying all ways to give each rank as many copies."""
    size = len(weights) // ranks
    best, totals, counts = math.inf, [0.0] * ranks, [0] * ranks
    ordered = sorted(weights, reverse=True)

    def place(index: int) -> None:
        nonlocal best
        if max(totals) >= best:
            return
        if index == len(ordered):
            best = max(totals)
            return
        tried = set()
        for rank in range(ranks):
            state = totals[rank], counts[rank]
            if counts[rank] < size and state not in tried:
                tried.add(state)
                totals[rank], counts[rank] = state[0] + ordered[index], state[1] + 1
                place(index + 1)
                totals[rank], counts[rank] = state

    place(0)
    return best


@settings(max_examples=200)
@given(layers())
def test_each_expert_has_a_slot_and_the_ranks_are_nearly_balanced(layer: tuple[list[int], int, int]) -> None:
    """The bound is that of packing the longest first, 4/3 - 1 / (3 ranks) of the optimum (Graham 1969), which is not
    proven for ranks with as many slots each; here all ways are tried."""
    load, ranks, slots = layer
    placement = place_experts(load, slots, ranks)
    copies = count_copies(load, slots)
    assert Counter(placement) == dict(enumerate(copies)) and len(placement) == slots and min(copies) >= 1
    loads = rank_loads(load, placement, ranks)
    assert loads.sum() == pytest.approx(sum(load))
    weights = [tokens / count for tokens, count in zip(load, copies, strict=True) for _ in range(count)]
    assert loads.max() <= (4 / 3 - 1 / (3 * ranks)) * least_largest_load(weights, ranks) + 1e-9
    assert place_experts(load, slots, ranks) == placement


@settings(max_examples=200)
@given(layers())
def test_no_other_copies_have_a_smaller_largest_load(layer: tuple[list[int], int, int]) -> None:
    load, _, slots = layer
    best = min(
        max(tokens / (1 + extra.count(expert)) for expert, tokens in enumerate(load))
        for extra in combinations_with_replacement(range(len(load)), min(5, slots - len(load)))
    )
    copies = count_copies(load, len(load) + min(5, slots - len(load)))
    assert max(tokens / count for tokens, count in zip(load, copies, strict=True)) == pytest.approx(best)


def test_paper_example_by_hand() -> None:
    """The most loaded expert gets the copy; its two copies share the tokens on different ranks."""
    load = [90, 10, 30, 20, 40, 10]
    assert count_copies(load, 7) == [2, 1, 1, 1, 1, 1] and count_copies(load, 8) == [3, 1, 1, 1, 1, 1]
    placement = place_experts(load, 8, 2)
    assert placement == (0, 1, 3, 4, 0, 0, 2, 5) and rank_loads(load, placement, 2).tolist() == [100, 100]
    start = initial_placement(6, 8)
    assert start == (0, 1, 2, 3, 4, 5, 0, 1) and imbalance(load, start, 2) == pytest.approx(1.0)
    assert imbalance(load, (0, 2, 4, 3, 1, 5, 1, 5), 2) == pytest.approx(180 / 100)


def test_no_load_is_balanced() -> None:
    assert imbalance([0, 0], place_experts([0, 0], 4, 2), 2) == 1.0


def test_wrong_sizes() -> None:
    with pytest.raises(ValueError, match="5 slots do not divide by 2 ranks"):
        place_experts([1, 2], 5, 2)
    with pytest.raises(ValueError, match="2 slots are fewer than the 3 experts"):
        place_experts([1, 2, 3], 2, 2)
