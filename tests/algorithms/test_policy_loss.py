"""The PPO loss: clipping and dual clipping."""

import math

import pytest
import torch

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


def test_huge_ratio_has_a_finite_gradient():
    logprobs = torch.tensor([0.0], requires_grad=True)
    result = ppo(logprobs, torch.tensor([-500.0]), torch.tensor([-1.0]), torch.tensor([True]), Clip(0.2, dual=3.0))
    result.loss.sum().backward()
    assert float(result.loss.detach()) == 3.0
    assert logprobs.grad is not None and float(logprobs.grad) == 0.0
