import random

import numpy as np
import pytest

from megarl.data.packing import partition, plan_micro_batches


def test_by_hand():
    # At most 10 tokens: 27 need three micro-batches, so two for each rank. Differencing into four: 9 and 7 beside each
    # other, then 5, then 4, and 2 to the emptiest, which has the 4. The two largest go first, 9 to rank 0 and 7 to rank
    # 1; then the next larger to the rank that has less.
    assert plan_micro_batches([5, 9, 2, 7, 4], dp=2, token_budget=10) == [[[1], [0]], [[3], [2, 4]]]


def test_a_multiple_of_micro_batches():
    # Three micro-batches would do; asked for an even number, all four are used.
    plan = plan_micro_batches([5, 9, 2, 7, 4], dp=1, token_budget=10, multiple=2)
    assert plan == [[[1], [3], [2, 4], [0]]]
    assert plan_micro_batches([5], dp=1, token_budget=10, multiple=3) == [[[0], [], []]]


def test_partition_by_hand():
    # The example of Karmarkar and Karp's method: greedily 8 7 6 5 4 is 17 to 13, differencing makes it 16 to 14.
    parts = partition(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), 2)
    assert sorted(parts) == [[0, 2], [1, 3, 4]]


def greedy(costs, bins):
    loads = [0.0] * bins
    for cost in sorted(costs, reverse=True):
        loads[loads.index(min(loads))] += cost
    return max(loads)


def test_partition_is_even_and_better_than_greedy():
    rng = np.random.default_rng(1)
    gains = []
    for _ in range(40):
        costs, bins = rng.lognormal(0.0, 0.8, rng.integers(30, 200)), int(rng.integers(2, 12))
        parts = partition(costs, bins)
        assert sorted(item for part in parts for item in part) == list(range(len(costs)))
        assert all(part == sorted(part) for part in parts)
        gains.append(greedy(costs, bins) / max(costs[part].sum() for part in parts))
    assert np.mean(gains) > 1.0 and min(gains) > 0.97


@pytest.mark.parametrize("quadratic", [0.0, 3e-5, 3e-4])
def test_ranks_compute_about_equally_long_at_any_time(quadratic):
    """Long-tailed lengths as of rollouts: 512 to 4 ranks, up to 8192 tokens at once."""
    rng = np.random.default_rng(2)
    lengths = np.minimum(rng.lognormal(6.0, 0.7, 512), 4096).astype(int).tolist()
    plan = plan_micro_batches(lengths, 4, 8192, quadratic)
    cost = [[sum(lengths[i] * (1 + quadratic * lengths[i]) for i in micro) for micro in rank] for rank in plan]
    whole = [sum(rank) for rank in cost]
    assert max(whole) <= 1.01 * np.mean(whole)
    waited = sum(max(together) for together in zip(*cost, strict=True)) / np.mean(whole)
    assert waited <= 1.02  # all wait for the slowest after each micro-batch
    assert len(plan[0]) <= 1.1 * sum(lengths) / (4 * 8192) + 1


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


def test_what_belongs_together_is_not_parted():
    """Pairs of 11, 6, 13 and 7 tokens, at most 13 at once: three micro-batches would do, so two for each rank."""
    lengths, together = [5, 3, 9, 4, 6, 3, 4, 3], [7, 1, 2, 2, 7, 1, 4, 4]
    plan = plan_micro_batches(lengths, dp=2, token_budget=13, together=together)
    assert plan == [[[2, 3], [1, 5]], [[0, 4], [6, 7]]]
    # Three sequences beyond the budget are a micro-batch of their own, as one that is too long by itself.
    assert plan_micro_batches([5, 5, 5, 2], dp=1, token_budget=8, together=[0, 0, 0, 1]) == [[[0, 1, 2], [3]]]


def test_belonging_together_keeps_the_balance():
    rng = np.random.default_rng(4)
    lengths, quadratic = rng.integers(20, 900, 512).tolist(), 3e-4
    plan = plan_micro_batches(lengths, 4, 4096, quadratic, together=[i // 2 for i in range(512)])
    for rank in plan:
        for micro in rank:
            assert micro == sorted(micro) and micro[0::2] == [i - 1 for i in micro[1::2]]
            assert sum(lengths[i] for i in micro) <= 4096
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(512))
    cost = [sum(lengths[i] * (1 + quadratic * lengths[i]) for micro in rank for i in micro) for rank in plan]
    assert max(cost) <= 1.01 * np.mean(cost)
