"""Micro-batch plans that keep sequences on their owner ranks: as fast as free plans, with few tokens moved."""

import numpy as np
import pytest
import torch

from megarl.data import packing
from megarl.data.packing import MAX_SLOWDOWN, partition_near_home, plan_micro_batches

pytestmark = pytest.mark.alone

KINDS = {
    "even": lambda rng, n: rng.integers(2000, 8000, n),
    "long-tailed": lambda rng, n: np.minimum(rng.lognormal(6.9, 0.7, n), 16384).astype(np.int64) + 1,
    "wide": lambda rng, n: np.minimum(rng.lognormal(7.5, 1.1, n), 32768).astype(np.int64) + 1,
    "all long": lambda rng, n: np.full(n, 32768),
}


def sorted_indices(plan):
    return sorted(i for rank in plan for micro in rank for i in micro)


def moved_fraction(plan, lengths, owner):
    """Return the fraction of tokens that are not on their owner rank."""
    num_moved = sum(
        int(lengths[i]) for rank, local in enumerate(plan) for micro in local for i in micro if owner[i] != rank
    )
    return num_moved / int(np.sum(lengths))


def min_moved_fraction(lengths, owner, dp):
    """Return the least fraction that any plan with equal tokens per rank moves: what owners have above the mean."""
    kept_tokens = np.bincount(owner, weights=lengths, minlength=dp)
    return np.maximum(kept_tokens - kept_tokens.mean(), 0).sum() / kept_tokens.sum()


def rank_and_step_time(plan, costs):
    cost = np.array([[costs[micro].sum() for micro in rank] for rank in plan])
    return np.array([cost.sum(axis=1).max(), cost.max(axis=0).sum()])


def test_owner_ranks_by_hand():
    # 18 tokens on rank 0 and 10 on rank 1: the 4 moves, and each rank has 14.
    lengths, owner = [9, 5, 4, 10], [0, 0, 0, 1]
    assert plan_micro_batches(lengths, 2, 10, owner_rank=owner) == [[[0], [1]], [[3], [2]]]
    # Sequences of equal length are interchangeable, so none moves.
    assert plan_micro_batches([6, 6, 6, 6], 2, 12, owner_rank=[1, 0, 0, 1]) == [[[1, 2]], [[0, 3]]]


def test_single_owner_keeps_its_share():
    plan = plan_micro_batches([5] * 12, 3, 10, owner_rank=[1] * 12)
    assert sorted_indices(plan) == list(range(12)) and [sum(map(len, rank)) for rank in plan] == [4, 4, 4]
    assert [[len(micro) for micro in rank] for rank in plan] == [[2, 2]] * 3


@pytest.mark.parametrize("quadratic", [0.0, 1 / (6 * 4096)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number, dp", [(100, 4), (512, 8), (1024, 8), (1200, 16), (4096, 8)])
def test_owner_ranks_move_few_tokens_at_equal_speed(kind, number, dp, quadratic):
    rng = np.random.default_rng(7)
    lengths, owner, budget = KINDS[kind](rng, number), rng.integers(0, dp, number), 32768
    costs = lengths + quadratic * lengths**2.0
    free = plan_micro_batches(lengths, dp, budget, quadratic)
    plan = plan_micro_batches(lengths, dp, budget, quadratic, owner_rank=owner)
    assert sorted_indices(plan) == list(range(number))
    assert {len(rank) for rank in plan} == {len(free[0])}
    assert all(micro == sorted(micro) for rank in plan for micro in rank)
    assert all(lengths[micro].sum() <= budget or len(micro) == 1 for rank in plan for micro in rank)
    cost = np.array([[costs[micro].sum() for micro in rank] for rank in plan])
    assert np.all(np.diff(cost, axis=1) <= 0)  # the most expensive first
    assert np.all(rank_and_step_time(plan, costs) <= MAX_SLOWDOWN * rank_and_step_time(free, costs))
    # With few sequences per rank, exchanges move more than the excess.
    assert (
        moved_fraction(plan, lengths, owner)
        <= min_moved_fraction(lengths, owner, dp) + 0.05 + 4 * dp / number
        < 0.5 * moved_fraction(free, lengths, owner)
    )


def test_balanced_owners_keep_their_sequences():
    rng = np.random.default_rng(1)
    lengths = rng.integers(2000, 8000, 2048)
    owner = np.empty(2048, dtype=np.int64)
    for rank, micros in enumerate(plan_micro_batches(lengths, 8, 65536)):
        owner[[i for micro in micros for i in micro]] = rank
    assert moved_fraction(plan_micro_batches(lengths, 8, 65536, owner_rank=owner), lengths, owner) <= 0.01


@pytest.mark.parametrize("seed", range(40))
def test_random_lengths_owners_and_groups(seed):
    """Includes sequences without owner, ranks without sequences, groups, and multiples of micro-batches."""
    rng = np.random.default_rng(seed)
    dp, multiple, number = int(rng.integers(1, 7)), int(rng.integers(1, 4)), int(rng.integers(0, 120))
    lengths, budget = np.exp(rng.uniform(0, 5.5, number)).astype(np.int64) + 1, int(rng.integers(20, 200))
    owner = rng.integers(-1, max(1, int(rng.integers(0, dp + 1))), number)
    together = rng.integers(0, 50, number) if seed % 3 == 0 else None
    quadratic = (0.0, 0.01)[seed % 2]
    settings = dict(token_budget=budget, quadratic=quadratic, multiple=multiple, group=together)
    free = plan_micro_batches(lengths, dp, **settings)
    plan = plan_micro_batches(lengths, dp, **settings, owner_rank=owner)
    assert sorted_indices(plan) == list(range(number)) and {len(rank) for rank in plan} == {len(free[0])}
    groups = np.arange(number) if together is None else together
    position = {group: (r, m) for r, rank in enumerate(plan) for m, micro in enumerate(rank) for group in groups[micro]}
    for r, rank in enumerate(plan):
        for m, micro in enumerate(rank):
            assert all(position[group] == (r, m) for group in groups[micro])
            assert lengths[micro].sum() <= budget or len(set(groups[micro])) == 1
    costs = lengths + quadratic * lengths**2.0
    assert np.all(rank_and_step_time(plan, costs) <= MAX_SLOWDOWN * rank_and_step_time(free, costs) * (1 + 1e-9))
    if dp == 1 or not (owner >= 0).any():
        assert plan == free


def test_groups_go_to_the_rank_with_most_of_their_tokens():
    plan = plan_micro_batches([5, 1, 5, 3, 3], 2, 9, group=[0, 0, 1, 1, 0], owner_rank=[1, 0, 0, 1, 1])
    assert plan == [[[2, 3]], [[0, 1, 4]]]


def test_plan_is_deterministic_and_copied():
    rng = np.random.default_rng(2)
    lengths, owner = rng.integers(20, 900, 700), rng.integers(-1, 4, 700)
    plans = []
    for kind in (np.array, torch.tensor, lambda values: values.tolist()):
        packing._cached_plan.cache_clear()
        plans.append(plan_micro_batches(kind(lengths), 4, 4096, 1e-4, owner_rank=kind(owner)))
        plans[-1][0].append("mine")
        assert plan_micro_batches(kind(lengths), 4, 4096, 1e-4, owner_rank=kind(owner)) == [
            plans[-1][0][:-1],
            *plans[-1][1:],
        ]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("owner", [[0, 2], [0], [0, 1, 1]])
def test_invalid_owner_ranks_raise(owner):
    with pytest.raises(ValueError, match=f"`owner_rank` has {len(owner)} numbers below 2 for 2 sequences"):
        plan_micro_batches([5, 5], 2, 10, owner_rank=owner)


def test_items_costlier_than_a_part_are_spread_evenly():
    """Nine expensive items and one of half the cost, all on one of four owners, among many cheap items."""
    costs = np.array([100.0] * 9 + [52.0] + [2.0] * 100)
    owner_rank = np.array([2] * 10 + [i % 4 for i in range(100)])
    for owner in partition_near_home(costs, costs.astype(np.int64), 200, owner_rank, 4, 5):
        holders = np.bincount(owner[:9] // 5, minlength=4).tolist()
        assert holders == [2, 2, 3, 2]  # the owner keeps one more
        assert len(set(owner[:10])) == 10 and not set(owner[:10]) & set(owner[10:])
        kept_tokens = np.bincount(owner, weights=costs, minlength=20)
        assert kept_tokens[owner[10:]].max() <= 1.1 * 200 / 10
