"""The PPO loss: clipping and dual clipping."""

import math

import pytest
import torch

from megarl.algorithms.losses import token_mean_weights
from megarl.algorithms.policy_losses import Clip, PolicyLossInput, ppo_loss
from megarl.types import TokenLoss

pytestmark = pytest.mark.alone

F64 = torch.float64
# case: ratio, advantage -> loss, clipped, dual-clipped, gradient with respect to the ratio (clip 0.2, dual clip 3)
CASES = [
    (1.0, 2.0, -2.0, 0, 0, -2.0),  # on policy
    (1.1, 2.0, -2.2, 0, 0, -2.0),  # inside
    (1.5, 2.0, -2.4, 1, 0, 0.0),  # good and already more likely: capped at 1.2
    (0.5, 2.0, -1.0, 0, 0, -2.0),  # good and less likely: full gradient
    (0.5, -2.0, 1.6, 1, 0, 0.0),  # bad and already less likely: capped at 0.8
    (1.5, -2.0, 3.0, 0, 0, 2.0),  # bad and more likely: full gradient
    (2.9, -2.0, 5.8, 0, 0, 2.0),  # just below the dual clip
    (4.0, -2.0, 6.0, 0, 1, 0.0),  # beyond it: 3 * 2
    (4.0, 0.0, 0.0, 0, 0, 0.0),
]


def ppo(logprobs, old_logprobs, advantages, mask, clip: Clip) -> TokenLoss:
    cu_seqlens = torch.tensor([0, len(logprobs)])
    return ppo_loss(PolicyLossInput(logprobs, old_logprobs, advantages, mask, cu_seqlens), clip)


@pytest.mark.parametrize("ratio, advantage, loss, clipped, bounded, gradient", CASES)
def test_ppo_loss_by_hand(ratio, advantage, loss, clipped, bounded, gradient):
    logprobs = torch.tensor([math.log(ratio) - 1.0], dtype=F64, requires_grad=True)
    result = ppo(
        logprobs,
        torch.tensor([-1.0], dtype=F64),
        torch.tensor([advantage], dtype=F64),
        torch.tensor([True]),
        Clip(0.2, high=0.2, dual=3.0),
    )
    assert float(result.loss.detach()) == pytest.approx(loss, abs=1e-12)
    assert float(result.metrics["actor/pg_clipfrac"]) == clipped
    assert float(result.metrics["actor/pg_clipfrac_lower"]) == bounded
    assert float(result.metrics["actor/ppo_kl"]) == pytest.approx(-math.log(ratio), abs=1e-12)
    result.loss.sum().backward()
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(gradient * ratio, abs=1e-12)  # d ratio / d logprob = ratio


def test_clip_higher_without_dual_clip():
    logprobs = torch.log(torch.tensor([1.25, 4.0], dtype=F64))
    args = (torch.zeros(2, dtype=F64), torch.tensor([1.0, -1.0], dtype=F64), torch.tensor([True, True]))
    assert ppo(logprobs, *args, Clip(0.2, high=0.28)).loss.tolist() == pytest.approx([-1.25, 4.0])
    assert ppo(logprobs, *args, Clip(0.2)).loss.tolist() == pytest.approx([-1.2, 4.0])
    with pytest.raises(ValueError, match="dual_clip"):
        ppo(logprobs, *args, Clip(0.2, dual=1.0))


def loop_loss(new, old, advantage, low, high, dual):
    ratio = math.exp(new - old)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * dual) if advantage < 0 else loss


@pytest.mark.parametrize("seed", range(10))
def test_ppo_loss_matches_a_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantage = torch.randn(3, 200, generator=generator, dtype=F64)
    mask = torch.rand(200, generator=generator) < 0.7
    expected = [
        loop_loss(a, b, c, 0.2, 0.3, 3.0) if m else 0.0
        for a, b, c, m in zip(new.tolist(), old.tolist(), advantage.tolist(), mask.tolist(), strict=True)
    ]
    result = ppo(new, old, advantage, mask, Clip(0.2, high=0.3, dual=3.0))
    torch.testing.assert_close(result.loss, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


def test_on_policy_update_has_the_policy_gradient():
    # With old == new the gradient of the loss in logprobs is -A, and nothing is clipped.
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = ppo(logprobs, logprobs.detach(), torch.tensor([2.0, -3.0]), torch.ones(2).bool(), Clip(0.2, dual=3.0))
    result.loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-2.0, 3.0]
    assert all(float(metric.abs().sum()) == 0 for metric in result.metrics.values())


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), 1e30, -1e30])
def test_masked_positions_have_no_effect(garbage):
    mask = torch.tensor([True, False, False, False])
    logprobs = torch.tensor([-1.0, garbage, 0.0, 0.0], requires_grad=True)
    old, advantages = torch.tensor([-1.0, 0.0, garbage, 0.0]), torch.tensor([1.0, 0.0, 0.0, garbage])
    result = ppo(logprobs, old, advantages, mask, Clip(0.2, dual=3.0))
    assert result.loss.tolist() == [-1.0, 0, 0, 0]
    for metric in result.metrics.values():
        assert metric[1:].tolist() == [0, 0, 0] and not metric.requires_grad
    result.loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 0, 0, 0]


def test_huge_ratio_has_a_finite_gradient():
    logprobs = torch.tensor([0.0], requires_grad=True)
    result = ppo(logprobs, torch.tensor([-500.0]), torch.tensor([-1.0]), torch.tensor([True]), Clip(0.2, dual=3.0))
    result.loss.sum().backward()
    assert float(result.loss.detach()) == 3.0
    assert logprobs.grad is not None and float(logprobs.grad) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_weighted_sum_does_not_depend_on_micro_batches(seed):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantage = torch.randn(3, 120, generator=generator, dtype=F64)
    mask = torch.rand(120, generator=generator) < 0.4
    weights = token_mean_weights(mask, int(mask.sum())).double()

    def total(index):
        result = ppo(new[index], old[index], advantage[index], mask[index], Clip(0.2, dual=3.0))
        return float((weights[index] * result.loss).sum())

    full = total(torch.arange(120))
    cut = torch.randperm(120, generator=generator).split([7, 50, 1, 62])
    assert sum(total(index) for index in cut) == pytest.approx(full, abs=1e-12)
