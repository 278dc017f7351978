import random

import pytest

from megarl.data.packing import plan_micro_batches


def test_by_hand():
    # Longest first to the less loaded rank: 9 -> A, 7 -> B, 5 -> B (7 < 9), 4 -> A (9 < 12), 2 -> B (12 < 13).
    # Both need two micro-batches of at most 10: A {9}, {4}; B {7}, {5, 2}, where the lower indices come first.
    assert plan_micro_batches([5, 9, 2, 7, 4], dp=2, token_budget=10) == [[[1], [4]], [[0, 2], [3]]]


def test_long_sequence_is_alone_and_ranks_without_work_get_empty_micro_batches():
    assert plan_micro_batches([3, 20, 3], dp=1, token_budget=8) == [[[1], [0, 2]]]
    assert plan_micro_batches([5], dp=3, token_budget=8) == [[[0]], [[]], [[]]]
    assert plan_micro_batches([], dp=2, token_budget=8) == [[[]], [[]]]


@pytest.mark.parametrize("seed", range(30))
def test_every_sequence_once_equal_counts_within_budget(seed):
    rng = random.Random(seed)
    dp, budget = rng.randint(1, 6), rng.randint(20, 200)
    lengths = [rng.randint(1, 250) for _ in range(rng.randint(0, 120))]
    plan = plan_micro_batches(lengths, dp, budget)
    assert plan == plan_micro_batches(list(lengths), dp, budget)
    assert len(plan) == dp
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
    for rank in plan:
        sizes = [sum(lengths[i] for i in micro) for micro in rank]
        assert sizes == sorted(sizes, reverse=True)
        for micro, size in zip(rank, sizes, strict=True):
            assert size <= budget or len(micro) == 1
    loads = [sum(lengths[i] for micro in rank for i in micro) for rank in plan]
    if lengths:
        assert max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize("dp, budget", [(0, 10), (1, 0)])
def test_nonsense_is_refused(dp, budget):
    with pytest.raises(ValueError, match="at least 1"):
        plan_micro_batches([1], dp, budget)


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has 0 tokens"):
        plan_micro_batches([1, 0], 1, 10)
