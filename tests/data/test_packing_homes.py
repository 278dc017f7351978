"""Plans in which sequences stay where they are: as good as those without homes, and few tokens move."""

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


def flat(plan):
    return sorted(i for rank in plan for micro in rank for i in micro)


def moved(plan, lengths, home):
    """Tokens of sequences that are not where their home is, over all."""
    away = sum(int(lengths[i]) for rank, local in enumerate(plan) for micro in local for i in micro if home[i] != rank)
    return away / int(np.sum(lengths))


def least(lengths, home, dp):
    """No plan whose ranks have equally many tokens moves less: what homes have above the mean."""
    retained = np.bincount(home, weights=lengths, minlength=dp)
    return np.maximum(retained - retained.mean(), 0).sum() / retained.sum()


def times(plan, costs):
    cost = np.array([[costs[micro].sum() for micro in rank] for rank in plan])
    return np.array([cost.sum(axis=1).max(), cost.max(axis=0).sum()])


def test_by_hand():
    # 18 tokens at rank 0 and 10 at rank 1: the 4 moves. Of 14 each rank has a 9 or 10, and the rest beside it.
    lengths, home = [9, 5, 4, 10], [0, 0, 0, 1]
    assert plan_micro_batches(lengths, 2, 10, owner_rank=home) == [[[0], [1]], [[3], [2]]]
    # Those of the same length change places: with homes nobody moves.
    assert plan_micro_batches([6, 6, 6, 6], 2, 12, owner_rank=[1, 0, 0, 1]) == [[[1, 2]], [[0, 3]]]


def test_one_home_keeps_its_share():
    plan = plan_micro_batches([5] * 12, 3, 10, owner_rank=[1] * 12)
    assert flat(plan) == list(range(12)) and [sum(map(len, rank)) for rank in plan] == [4, 4, 4]
    assert [[len(micro) for micro in rank] for rank in plan] == [[2, 2]] * 3


@pytest.mark.parametrize("quadratic", [0.0, 1 / (6 * 4096)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number, dp", [(100, 4), (512, 8), (1024, 8), (1200, 16), (4096, 8)])
def test_no_worse_than_without_homes_and_few_tokens_move(kind, number, dp, quadratic):
    rng = np.random.default_rng(7)
    lengths, home, budget = KINDS[kind](rng, number), rng.integers(0, dp, number), 32768
    costs = lengths + quadratic * lengths**2.0
    free = plan_micro_batches(lengths, dp, budget, quadratic)
    plan = plan_micro_batches(lengths, dp, budget, quadratic, owner_rank=home)
    assert flat(plan) == list(range(number))
    assert {len(rank) for rank in plan} == {len(free[0])}
    assert all(micro == sorted(micro) for rank in plan for micro in rank)
    assert all(lengths[micro].sum() <= budget or len(micro) == 1 for rank in plan for micro in rank)
    cost = np.array([[costs[micro].sum() for micro in rank] for rank in plan])
    assert np.all(np.diff(cost, axis=1) <= 0)  # the most expensive first
    assert np.all(times(plan, costs) <= MAX_SLOWDOWN * times(free, costs))
    # Where ranks have few sequences exchanges move more than what is too much.
    assert (
        moved(plan, lengths, home)
        <= least(lengths, home, dp) + 0.05 + 4 * dp / number
        < 0.5 * moved(free, lengths, home)
    )


def test_homes_that_are_balanced_are_kept():
    rng = np.random.default_rng(1)
    lengths = rng.integers(2000, 8000, 2048)
    home = np.empty(2048, dtype=np.int64)
    for rank, micros in enumerate(plan_micro_batches(lengths, 8, 65536)):
        home[[i for micro in micros for i in micro]] = rank
    assert moved(plan_micro_batches(lengths, 8, 65536, owner_rank=home), lengths, home) <= 0.01


@pytest.mark.parametrize("seed", range(40))
def test_any_lengths_and_homes(seed):
    """Also some without a home, ranks that have none, groups, and several micro-batches at a time."""
    rng = np.random.default_rng(seed)
    dp, multiple, number = int(rng.integers(1, 7)), int(rng.integers(1, 4)), int(rng.integers(0, 120))
    lengths, budget = np.exp(rng.uniform(0, 5.5, number)).astype(np.int64) + 1, int(rng.integers(20, 200))
    home = rng.integers(-1, max(1, int(rng.integers(0, dp + 1))), number)
    together = rng.integers(0, 50, number) if seed % 3 == 0 else None
    quadratic = (0.0, 0.01)[seed % 2]
    settings = dict(token_budget=budget, quadratic=quadratic, multiple=multiple, group=together)
    free = plan_micro_batches(lengths, dp, **settings)
    plan = plan_micro_batches(lengths, dp, **settings, owner_rank=home)
    assert flat(plan) == list(range(number)) and {len(rank) for rank in plan} == {len(free[0])}
    groups = np.arange(number) if together is None else together
    at = {group: (r, m) for r, rank in enumerate(plan) for m, micro in enumerate(rank) for group in groups[micro]}
    for r, rank in enumerate(plan):
        for m, micro in enumerate(rank):
            assert all(at[group] == (r, m) for group in groups[micro])
            assert lengths[micro].sum() <= budget or len(set(groups[micro])) == 1
    costs = lengths + quadratic * lengths**2.0
    assert np.all(times(plan, costs) <= MAX_SLOWDOWN * times(free, costs) * (1 + 1e-9))
    if dp == 1 or not (home >= 0).any():
        assert plan == free


def test_a_group_goes_where_most_of_its_tokens_are():
    plan = plan_micro_batches([5, 1, 5, 3, 3], 2, 9, group=[0, 0, 1, 1, 0], owner_rank=[1, 0, 0, 1, 1])
    assert plan == [[[2, 3]], [[0, 1, 4]]]


def test_the_same_on_every_rank_and_each_callers_own():
    rng = np.random.default_rng(2)
    lengths, home = rng.integers(20, 900, 700), rng.integers(-1, 4, 700)
    plans = []
    for kind in (np.array, torch.tensor, lambda values: values.tolist()):
        packing._cached_plan.cache_clear()
        plans.append(plan_micro_batches(kind(lengths), 4, 4096, 1e-4, owner_rank=kind(home)))
        plans[-1][0].append("mine")
        assert plan_micro_batches(kind(lengths), 4, 4096, 1e-4, owner_rank=kind(home)) == [
            plans[-1][0][:-1],
            *plans[-1][1:],
        ]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("home", [[0, 2], [0], [0, 1, 1]])
def test_homes_that_are_not_there_are_refused(home):
    with pytest.raises(ValueError, match=f"`owner_rank` has {len(home)} numbers below 2 for 2 sequences"):
        plan_micro_batches([5, 5], 2, 10, owner_rank=home)


def test_what_is_costlier_than_a_part_is_shared_out_evenly():
    """Nine of about equal cost and one that is half as much, at one home of four, among many others."""
    costs = np.array([100.0] * 9 + [52.0] + [2.0] * 100)
    home = np.array([2] * 10 + [i % 4 for i in range(100)])
    for owner in partition_near_home(costs, costs.astype(np.int64), 200, home, 4, 5):
        holders = np.bincount(owner[:9] // 5, minlength=4).tolist()
        assert holders == [2, 2, 3, 2]  # the home keeps the one more
        assert len(set(owner[:10])) == 10 and not set(owner[:10]) & set(owner[10:])
        retained = np.bincount(owner, weights=costs, minlength=20)
        assert retained[owner[10:]].max() <= 1.1 * 200 / 10
