"""Micro-batch plans."""

import itertools
import random

import numpy as np
import pytest
import torch

from megarl.data import packing
from megarl.data.packing import min_micro_batches, plan_micro_batches

pytestmark = pytest.mark.alone


def test_plan_by_hand():
    # 27 tokens with a budget of 10 need three micro-batches, so two for each of two ranks. Differencing gives four
    # parts: 9, 7, 5 and 4 + 2. 9 goes to rank 0 and 7 to rank 1; the next larger part goes to the rank with less.
    assert plan_micro_batches([5, 9, 2, 7, 4], dp=2, token_budget=10) == [[[1], [0]], [[3], [2, 4]]]


def test_micro_batch_count_is_a_multiple():
    # Three micro-batches would suffice; an even number needs four.
    plan = plan_micro_batches([5, 9, 2, 7, 4], dp=1, token_budget=10, multiple=2)
    assert plan == [[[1], [3], [2, 4], [0]]]
    assert plan_micro_batches([5], dp=1, token_budget=10, multiple=3) == [[[0], [], []]]


@pytest.mark.parametrize("quadratic", [0.0, 3e-5, 3e-4])
def test_ranks_are_balanced_at_each_micro_batch(quadratic):
    """512 long-tailed lengths, as of rollouts, on 4 ranks with a budget of 8192 tokens."""
    rng = np.random.default_rng(2)
    lengths = np.minimum(rng.lognormal(6.0, 0.7, 512), 4096).astype(int).tolist()
    plan = plan_micro_batches(lengths, 4, 8192, quadratic)
    cost = [[sum(lengths[i] * (1 + quadratic * lengths[i]) for i in micro) for micro in rank] for rank in plan]
    full = [sum(rank) for rank in cost]
    assert max(full) <= 1.01 * np.mean(full)
    step_time = sum(max(together) for together in zip(*cost, strict=True)) / np.mean(full)
    assert step_time <= 1.02  # ranks wait for the slowest after each micro-batch
    assert len(plan[0]) <= 1.1 * sum(lengths) / (4 * 8192) + 1


@pytest.mark.parametrize("has_homes", [False, True])
@pytest.mark.parametrize(
    "number, dp, longest", [(512, 8, 32768), (512, 32, 32768), (1024, 64, 65536), (512, 64, 32768), (128, 16, 131072)]
)
@pytest.mark.parametrize("quadratic", [1 / 30_000, 1 / 60_000])  # Qwen3-30B-A3B, DeepSeek-V3
def test_ranks_that_wait_at_the_end_alone_take_equally_long(quadratic, number, dp, longest, has_homes):
    """Within 3 % of the lower bound at long contexts, where the longest sequence fills a micro-batch."""
    rng = np.random.default_rng(4)
    lengths = np.minimum(longest, rng.lognormal(np.log(longest / 8), 1.0, number).astype(np.int64) + 64)
    costs = lengths + quadratic * lengths**2.0
    homes = rng.integers(0, dp, number) if has_homes else None
    plan = plan_micro_batches(lengths, dp, longest, quadratic, owner_rank=homes, is_lockstep=False)
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(number))
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) <= 1.2 * lengths.sum() / (dp * longest) + 2
    assert all(lengths[micro].sum() <= longest or len(micro) == 1 for rank in plan for micro in rank)
    cost = np.array([[costs[micro].sum() for micro in rank] for rank in plan])
    assert np.all(np.diff(cost, axis=1) <= 0)  # the most expensive first
    bound = max(costs.sum() / dp, costs.max())
    assert cost.sum(axis=1).max() <= 1.03 * bound
    in_step = plan_micro_batches(lengths, dp, longest, quadratic, owner_rank=homes)
    step_cost = np.array([[costs[micro].sum() for micro in rank] for rank in in_step])
    assert cost.sum(axis=1).max() <= step_cost.sum(axis=1).max()


@pytest.mark.parametrize("seed", range(20))
def test_plan_of_ranks_is_complete_and_within_budget(seed):
    rng = np.random.default_rng(seed)
    dp, multiple, number = int(rng.integers(1, 7)), int(rng.integers(1, 4)), int(rng.integers(0, 120))
    lengths, budget = np.exp(rng.uniform(0, 5.5, number)).astype(np.int64) + 1, int(rng.integers(20, 200))
    homes, group = rng.integers(-1, dp, number), rng.integers(0, 50, number) if seed % 3 == 0 else None
    settings = dict(group=group, multiple=multiple, minimum=2, is_lockstep=False)
    plan = plan_micro_batches(lengths, dp, budget, 0.01, owner_rank=homes, **settings)
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(number))
    assert {len(rank) for rank in plan} == {len(plan[0])} and len(plan[0]) % multiple == 0 and len(plan[0]) >= 2
    for micro in (micro for rank in plan for micro in rank):
        groups = len(micro) if group is None else len(set(group[micro].tolist()))
        assert lengths[micro].sum() <= budget or groups == 1


def test_long_sequences_are_alone_and_idle_ranks_get_empty_micro_batches():
    assert plan_micro_batches([3, 20, 3], dp=1, token_budget=8) == [[[1], [0, 2]]]
    assert plan_micro_batches([5], dp=3, token_budget=8) == [[[0]], [[]], [[]]]
    assert plan_micro_batches([], dp=2, token_budget=8) == [[[]], [[]]]


@pytest.mark.parametrize("seed", range(30))
def test_plan_is_complete_even_and_within_budget(seed):
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
def test_invalid_dp_or_budget_raises(dp, budget):
    with pytest.raises(ValueError, match="at least 1"):
        plan_micro_batches([1], dp, budget)


def test_empty_sequence_raises():
    with pytest.raises(ValueError, match="sequence 1 has 0 tokens"):
        plan_micro_batches([1, 0], 1, 10)


def test_invalid_lengths_raise():
    with pytest.raises(ValueError, match="`lengths` must be a row of whole numbers, not float64"):
        plan_micro_batches([1.5, 2.0], 1, 10)
    with pytest.raises(ValueError, match="`lengths` must be a row of whole numbers, not int64 of shape"):
        plan_micro_batches(np.ones((2, 2), dtype=np.int64), 1, 10)
    with pytest.raises(ValueError, match="`group` has 1 numbers for 2 sequences"):
        plan_micro_batches([1, 2], 1, 10, group=[0])


def test_groups_stay_together():
    """Pairs of 11, 6, 13 and 7 tokens with a budget of 13 need three micro-batches, so two for each rank."""
    lengths, together = [5, 3, 9, 4, 6, 3, 4, 3], [7, 1, 2, 2, 7, 1, 4, 4]
    plan = plan_micro_batches(lengths, dp=2, token_budget=13, group=together)
    assert plan == [[[2, 3], [1, 5]], [[0, 4], [6, 7]]]
    # A group beyond the budget is a micro-batch of its own, like a single long sequence.
    assert plan_micro_batches([5, 5, 5, 2], dp=1, token_budget=8, group=[0, 0, 0, 1]) == [[[0, 1, 2], [3]]]


def test_groups_keep_the_balance():
    rng = np.random.default_rng(4)
    lengths, quadratic = rng.integers(20, 900, 512).tolist(), 3e-4
    plan = plan_micro_batches(lengths, 4, 4096, quadratic, group=[i // 2 for i in range(512)])
    for rank in plan:
        for micro in rank:
            assert micro == sorted(micro) and micro[0::2] == [i - 1 for i in micro[1::2]]
            assert sum(lengths[i] for i in micro) <= 4096
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(512))
    cost = [sum(lengths[i] * (1 + quadratic * lengths[i]) for micro in rank for i in micro) for rank in plan]
    assert max(cost) <= 1.01 * np.mean(cost)


# ---- many sequences

KINDS = {
    "even": lambda rng, n: rng.integers(2000, 8000, n),
    "long-tailed": lambda rng, n: np.minimum(rng.lognormal(6.0, 0.7, n), 4096).astype(np.int64) + 1,
    "wide": lambda rng, n: np.minimum(rng.lognormal(7.5, 1.1, n), 32768).astype(np.int64) + 1,
    "all long": lambda rng, n: np.full(n, 32768),
}


@pytest.fixture
def tried_counts(monkeypatch):
    """Record the micro-batch counts that the planner tries, with an empty cache."""
    bin_counts, partition = [], packing.partition
    monkeypatch.setattr(packing, "partition", lambda costs, bins: bin_counts.append(bins) or partition(costs, bins))
    packing._cached_plan.cache_clear()
    return bin_counts


def greedy_plan(lengths, costs, dp, budget):
    """Assign the longest sequence to the cheapest micro-batch in which it fits; add one per rank if none does.

    Returns the costs of micro-batches [steps, dp].
    """
    count = -(-int(lengths.sum()) // (dp * budget))
    order = np.argsort(-costs, kind="stable")
    while True:
        loads, capacity = np.zeros(dp * count), np.full(dp * count, budget)
        for item in order:
            fits = (capacity >= lengths[item]) | (capacity == budget)
            part = np.where(fits, loads, np.inf).argmin()
            if not fits[part]:
                break
            loads[part] += costs[item]
            capacity[part] -= lengths[item]
        else:
            return np.sort(loads)[::-1].reshape(count, dp)
        count += 1


@pytest.mark.parametrize("quadratic", [0.0, 3e-4])
@pytest.mark.parametrize("kind", KINDS)
def test_large_plan_is_valid_and_no_worse_than_greedy(kind, quadratic):
    lengths, dp, budget = KINDS[kind](np.random.default_rng(3), 1200), 8, 32768
    costs = lengths + quadratic * lengths**2.0
    plan = plan_micro_batches(lengths, dp, budget, quadratic)
    assert len({len(rank) for rank in plan}) == 1 and len(plan) == dp
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
    assert all(micro == sorted(micro) for rank in plan for micro in rank)
    assert all(lengths[micro].sum() <= budget or len(micro) == 1 for rank in plan for micro in rank)
    cost = np.array([[costs[micro].sum() for micro in rank] for rank in plan])
    assert np.all(cost[:, :-1].min(axis=0) >= cost[:, 1:].max(axis=0))  # the most expensive first
    simple = greedy_plan(lengths, costs, dp, budget)
    assert cost.max(axis=0).sum() <= 1.01 * simple.max(axis=1).sum()  # ranks wait for the slowest
    assert cost.sum(axis=1).max() <= 1.01 * cost.sum(axis=1).mean()


@pytest.mark.parametrize(
    "kind, number, dp, budget, max_tried",
    [
        ("even", 16384, 64, 16384, 3),
        ("even", 16384, 4, 32768, 2),
        ("long-tailed", 16384, 4, 8192, 2),
        ("long-tailed", 16384, 16, 32768, 2),
        ("wide", 16384, 4, 32768, 2),
        ("all long", 1024, 64, 32768, 1),
    ],
)
def test_few_micro_batch_counts_are_tried(tried_counts, kind, number, dp, budget, max_tried):
    lengths = KINDS[kind](np.random.default_rng(5), number)
    plan = plan_micro_batches(lengths, dp, budget)
    assert len(tried_counts) <= max_tried
    assert len(plan[0]) <= 1.04 * lengths.sum() / (dp * budget) + 1


@pytest.mark.parametrize("quadratic", [3e-5, 3e-4, 1e-2])
def test_counts_grow_by_percent_with_quadratic_cost(tried_counts, quadratic):
    """Equal costs then differ from equal tokens, so the minimal count is out of reach."""
    plan_micro_batches(KINDS["wide"](np.random.default_rng(5), 16384), 4, 32768, quadratic)
    assert len(tried_counts) <= 24
    assert all(b - a == max(4, a // (4 * packing.COUNT_STEPS) * 4) for a, b in itertools.pairwise(tried_counts))


def test_plan_is_cached_and_copied(tried_counts):
    lengths, group = [5, 9, 2, 7, 4], [3, 1, 3, 0, 0]
    first = plan_micro_batches(lengths, 2, 11, group=group)
    expected = [[list(micro) for micro in rank] for rank in first]
    first[0][0].append(77)
    first[1].clear()
    for kind in (np.array, torch.tensor, tuple):
        assert plan_micro_batches(kind(lengths), 2, 11, group=kind(group)) == expected
    assert plan_micro_batches(np.array(lengths, dtype=np.int32), 2, 11, group=group) == expected
    assert len(tried_counts) == 1
    assert all(type(index) is int for rank in expected for micro in rank for index in micro)
    plan_micro_batches(lengths, 2, 11)
    plan_micro_batches(lengths, 2, 11, quadratic=0.5, group=group)
    assert len(tried_counts) == 3


def test_min_micro_batches_by_hand():
    assert min_micro_batches(np.array([5, 9, 2, 7, 4]), 10) == 3  # 27 tokens
    assert min_micro_batches(np.array([6, 6, 6, 6]), 10) == 4  # no two fit
    assert min_micro_batches(np.array([6, 6, 5, 5, 5]), 10) == 4  # no 5 fits with a 6, but two fit together
    assert min_micro_batches(np.array([30, 4, 4]), 10) == 2  # 30 exceeds the budget and is alone
    assert min_micro_batches(np.array([], dtype=np.int64), 10) == 0


@pytest.mark.parametrize("seed", range(20))
def test_min_micro_batches_is_a_lower_bound(seed):
    """Compare with every partition of seven sequences."""
    rng = np.random.default_rng(seed)
    sizes, budget = rng.integers(1, 15, 7), 12

    def count_bins(unplaced, capacities):
        if not unplaced:
            return len(capacities)
        size, *unplaced = unplaced
        ways = [count_bins(unplaced, [*capacities, max(0, budget - size)])]
        for number, capacity in enumerate(capacities):
            if capacity >= size:
                ways.append(count_bins(unplaced, [*capacities[:number], capacity - size, *capacities[number + 1 :]]))
        return min(ways)

    short = -(-int(np.minimum(sizes, budget).sum()) // budget)
    assert short - (sizes > budget).sum() <= min_micro_batches(sizes, budget) <= count_bins(sizes.tolist(), [])


def _computed(micro: list[int], order: np.ndarray, shared: np.ndarray, lengths: np.ndarray) -> int:
    """Return the tokens of a micro-batch that are computed: neighbours share the least of those between them."""
    places = np.argsort(order)
    chosen = sorted(micro, key=lambda index: places[index])
    total = 0
    for before, index in zip([None, *chosen], chosen, strict=False):
        between = [] if before is None else order[places[before] + 1 : places[index] + 1]
        total += int(lengths[index]) - (0 if before is None else int(shared[between].min()))
    return total


@pytest.mark.parametrize("seed", range(20))
def test_plans_with_common_tokens_are_complete_and_within_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups, samples, dp, budget = int(rng.integers(1, 9)), int(rng.integers(1, 17)), int(rng.integers(1, 4)), 300
    prompts = rng.integers(1, 100, groups).repeat(samples)
    lengths = prompts + rng.integers(1, 100, groups * samples)
    order = rng.permutation(groups).repeat(samples) * samples + np.tile(np.arange(samples), groups)
    shared = np.where(np.arange(len(lengths)) % samples > 0, prompts - 1, 0)
    plan = plan_micro_batches(lengths, dp, budget, 1e-4, common=(order, shared))
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    for micro in (micro for rank in plan for micro in rank):
        assert _computed(micro, order, shared, lengths) <= budget or len(micro) == 1


def test_samples_stay_with_their_prompt_where_that_is_faster() -> None:
    """Four prompts of 4,000 tokens with 16 responses of 1,000: 20,000 tokens of a group rather than 80,000."""
    lengths, order = np.full(64, 5000), np.arange(64)
    shared = np.where(np.arange(64) % 16 > 0, 4000, 0)
    plan = plan_micro_batches(lengths, 2, 20_000, common=(order, shared))
    assert sorted(micro for rank in plan for micro in rank) == [list(range(i, i + 16)) for i in range(0, 64, 16)]
    # One group for two ranks: two parts of 8 responses, each with the prompt, are faster than waiting for one.
    plan = plan_micro_batches(lengths[:16], 2, 20_000, common=(order[:16], shared[:16]))
    assert sorted(len(micro) for rank in plan for micro in rank) == [8, 8]


def test_groups_are_whole_with_common_tokens() -> None:
    lengths, shared = np.array([50, 50, 50, 50]), np.array([0, 40, 40, 40])
    groups = [0, 1, 0, 1]
    plan = plan_micro_batches(lengths, 2, 1000, group=groups, common=(np.array([0, 2, 1, 3]), shared))
    assert sorted(micro for rank in plan for micro in rank) == [[0, 2], [1, 3]]
