"""The clipped value loss and explained variance."""

import sys
from pathlib import Path

import pytest
import torch
from thread_ranks import as_ranks

from megarl.algorithms.losses import explained_variance, value_loss

sys.path.insert(0, str(Path(__file__).parent))

from sharded_batches import random_batch, shard_sequences  # noqa: E402

pytestmark = pytest.mark.alone

F64 = torch.float64


def test_value_loss_by_hand():
    # old value 0, clip 0.2
    values = torch.tensor([0.1, 1.0, 1.0, -0.5], dtype=F64, requires_grad=True)
    returns = torch.tensor([1.0, 1.0, 0.1, -1.0], dtype=F64)
    result = value_loss(values, torch.zeros(4, dtype=F64), returns, torch.ones(4).bool(), 0.2)
    # 0: inside: 0.9^2 / 2.             1: exact, but far from the old value: (0.2 - 1)^2 / 2.
    # 2: the plain error is the larger: 0.9^2 / 2.   3: -0.5 clipped to -0.2: 0.8^2 / 2 over 0.5^2 / 2.
    assert result.loss.tolist() == pytest.approx([0.405, 0.32, 0.405, 0.32], abs=1e-12)
    assert result.metrics["critic/vf_clipfrac"].tolist() == [0, 1, 0, 1]
    assert result.metrics["critic/vf_loss"].tolist() == pytest.approx([0.405, 0.32, 0.405, 0.32], abs=1e-12)
    assert result.metrics["critic/value_mean"].tolist() == [0.1, 1.0, 1.0, -0.5]
    assert result.metrics["critic/return_mean"].tolist() == [1.0, 1.0, 0.1, -1.0]
    result.loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 0.9, 0.0], abs=1e-12)  # v - R, and none where clipped


def test_value_loss_without_clip():
    result = value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([True]), None)
    assert float(result.loss) == 2.0 and float(result.metrics["critic/vf_clipfrac"]) == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_value_loss_matches_a_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    value, old, ret = torch.randn(3, 200, generator=generator, dtype=F64)
    mask = torch.rand(200, generator=generator) < 0.7
    expected = [
        0.5 * max((v - r) ** 2, (min(max(v, o - 0.5), o + 0.5) - r) ** 2) if m else 0.0
        for v, o, r, m in zip(value.tolist(), old.tolist(), ret.tolist(), mask.tolist(), strict=True)
    ]
    result = value_loss(value, old, ret, mask, 0.5)
    torch.testing.assert_close(result.loss, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("clip", [0.2, None])
def test_masked_positions_have_no_effect(garbage, clip):
    mask = torch.tensor([True, False, False, False])
    values = torch.tensor([1.0, garbage, 0.0, 0.0], requires_grad=True)
    old, returns = torch.tensor([1.0, 0.0, garbage, 0.0]), torch.tensor([0.0, 0.0, 0.0, garbage])
    result = value_loss(values, old, returns, mask, clip)
    assert result.loss.tolist() == [0.5, 0, 0, 0]
    for metric in result.metrics.values():
        assert metric[1:].tolist() == [0, 0, 0] and not metric.requires_grad
    result.loss.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1.0, 0, 0, 0]


def test_explained_variance_by_hand():
    returns = torch.tensor([0.0, 2.0, 4.0, float("nan")])
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((4,), 7.0), returns, mask) == 0.0
    # residuals 0, 1, 2: variance 2/3 against 8/3
    assert explained_variance(returns / 2, returns, mask) == pytest.approx(0.75)
    assert explained_variance(torch.tensor([4.0, 2.0, 0.0, 0.0]), returns, mask) == pytest.approx(-3.0)
    assert explained_variance(torch.zeros(2), torch.ones(2), torch.ones(2).bool()) == 0.0
    assert explained_variance(returns, returns, torch.zeros(4).bool()) == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_explained_variance_equals_the_formula_on_any_number_of_ranks(seed):
    mask, cu = random_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    values, returns = (torch.randn(2, len(mask), generator=generator) + 3).where(mask, float("nan"))
    masked_returns = returns[mask].double()
    expected = float(
        1.0 - (masked_returns - values[mask].double()).var(correction=0) / masked_returns.var(correction=0)
    )
    assert explained_variance(values, returns, mask) == expected
    for ranks in (1, 2, 5):
        shares = [tokens for _, tokens, _ in shard_sequences(cu, ranks, seed)]

        def work(comm, shares=shares):
            local = shares[comm.rank]
            return explained_variance(values[local], returns[local], mask[local], comm.all_reduce)

        results = as_ranks(ranks, work)
        assert set(results) == {results[0]}
        assert results[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("returns", [0.1, -7.3e-5, 0.0])
def test_explained_variance_of_equal_returns_is_zero(returns):
    def work(comm):
        count = (3, 0, 17, 6)[comm.rank]
        mask = torch.ones(count).bool()
        return explained_variance(torch.arange(count).float(), torch.full((count,), returns), mask, comm.all_reduce)

    assert as_ranks(4, work) == [0.0] * 4


def test_explained_variance_with_equal_returns_per_rank():
    def work(comm, part):
        returns = torch.full((2,), float(comm.rank))
        return explained_variance(part * returns, returns, torch.ones(2).bool(), comm.all_reduce)

    # returns 0 0 1 1 and values 0: residual and return have the same variance
    assert as_ranks(2, lambda comm: work(comm, 0.0)) == [0.0] * 2
    assert as_ranks(2, lambda comm: work(comm, 0.5)) == pytest.approx([0.75] * 2)
