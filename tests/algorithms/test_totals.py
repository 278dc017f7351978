"""Batch statistics of token values: they equal the plain formulas and do not depend on sharding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from thread_ranks import as_ranks

from megarl.algorithms import token_stats
from megarl.algorithms.token_stats import (
    DiffStats,
    count_action_tokens,
    diff_stats,
    kth_values,
    masked_select,
    token_mean,
)
from megarl.types import local_all_reduce

sys.path.insert(0, str(Path(__file__).parent))

from sharded_batches import random_batch, shard_sequences  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.fixture(params=[token_stats.BLOCK, 16])
def block(request, monkeypatch) -> int:
    monkeypatch.setattr(token_stats, "BLOCK", request.param)
    return request.param


def random_values(count: int, seed: int) -> torch.Tensor:
    """Return values of many magnitudes, with many ties."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(count, generator=generator).exp() * 10.0 ** torch.randint(-8, 3, (count,), generator=generator)
    spread[torch.rand(count, generator=generator) < 0.3] = 0.25
    spread[torch.rand(count, generator=generator) < 0.1] = 0.0
    return spread


def test_token_stats_by_hand():
    mask = torch.tensor([True, False, True, True])
    a, b = torch.tensor([1.0, float("nan"), 0.0, 5.0]), torch.tensor([0.5, 0.0, 3.0, 5.0])
    assert diff_stats(a, b, mask) == DiffStats(largest=3.0, p95=3.0, mean=float(torch.tensor(3.5) / 3))
    assert count_action_tokens(mask) == 3
    assert token_mean(torch.tensor([1.0, 0.0, 2.0, 6.0]), mask) == 3.0
    assert diff_stats(a, b, torch.zeros(4).bool()) is None
    assert token_mean(torch.zeros(4), torch.zeros(4).bool()) == 0.0
    assert masked_select(a, mask, torch.float64).tolist() == [1.0, 0.0, 5.0]


@pytest.mark.parametrize("seed", range(10))
def test_kth_values_are_exact(seed, block):
    values = random_values(2 + 97 * seed, seed)
    ks = (1, len(values) // 2, -(-len(values) * 95 // 100), len(values))
    assert kth_values(values, ks) == [float(values.kthvalue(max(k, 1)).values) for k in ks]


@pytest.mark.parametrize("values", [[0.0, 0.0, 1e-45], [1e-45, 3.4e38, float("inf")], [1.0, 1.0000001, 1.0000002]])
def test_kth_values_of_adjacent_and_extreme_floats(values):
    assert kth_values(torch.tensor(values), (1, 2, 3)) == torch.tensor(values).tolist()


def test_kth_values_reject_fp64():
    with pytest.raises(TypeError, match="float64"):
        kth_values(torch.zeros(3, dtype=torch.float64), (1,))


@pytest.mark.parametrize("seed", range(5))
def test_stats_equal_the_formulas_bitwise(seed, block):
    mask, _ = random_batch(seed)
    a, b = random_values(len(mask), seed), random_values(len(mask), seed + 100)
    diff = (a - b).abs()[mask]
    p95 = float(diff.kthvalue(-(-len(diff) * 95 // 100)).values)
    assert diff_stats(a, b, mask) == DiffStats(float(diff.max()), p95, float(diff.mean()))
    outside = torch.where(mask, a, 0.0)
    assert token_mean(outside, mask) == float(outside.sum() / mask.sum().clamp(min=1))
    assert torch.equal(masked_select(a, mask), a[mask])
    assert torch.equal(local_all_reduce(a), a)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_stats_do_not_depend_on_sharding(seed, ranks, block):
    mask, cu = random_batch(seed)
    a, b = random_values(len(mask), seed), random_values(len(mask), seed + 100)
    zero_outside = torch.where(mask, a, 0.0)
    shares = shard_sequences(cu, ranks, seed)

    def work(comm):
        all_reduce, (_, tokens, _) = comm.all_reduce, shares[comm.rank]
        local = mask[tokens]
        return (
            diff_stats(a[tokens], b[tokens], local, all_reduce),
            token_mean(zero_outside[tokens], local, all_reduce),
            count_action_tokens(local, all_reduce),
            comm.largest,
        )

    results = as_ranks(ranks, work)
    assert all(result == results[0] for result in results)
    (actual, mean, count, largest), full = results[0], diff_stats(a, b, mask)
    assert (actual.largest, actual.p95) == (full.largest, full.p95)
    assert actual.mean == pytest.approx(full.mean, rel=1e-6)
    assert mean == pytest.approx(token_mean(zero_outside, mask), rel=1e-6)
    assert count == int(mask.sum())
    assert largest <= 2 * 2048 * 8


def test_diff_stats_without_actions_are_none():
    def work(comm):
        values = torch.ones(comm.rank)
        return diff_stats(values, values, torch.zeros(comm.rank).bool(), comm.all_reduce)

    assert as_ranks(3, work) == [None] * 3
