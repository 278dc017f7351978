"""VAPO's NLL over positive responses, which normalises by itself under every loss aggregation."""

import pytest
import torch

from megarl.algorithms.losses import constant_weights, positive_nll, sequence_mean_weights, token_mean_weights
from megarl.types import Counts, TrainBatch

pytestmark = pytest.mark.alone

CU = torch.tensor([0, 3, 5, 9, 10])
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0, 1, 0]).bool()
LOGPROBS = torch.tensor([9.0, -1.0, -2.0, 9.0, -3.0, 9.0, -4.0, 9.0, -5.0, 9.0])
REWARD = torch.tensor([1.0, -1.0, 0.5, 2.0])  # the last has no action


def batch(weights: torch.Tensor, reward: torch.Tensor = REWARD, rewarded: int = 4) -> TrainBatch:
    zeros = torch.zeros(10)
    result = TrainBatch(zeros, CU, MASK, torch.arange(4), reward, zeros)
    return result.with_(loss_weights=weights, counts=Counts(5, 3, rewarded))


@pytest.mark.parametrize(
    "weights", [token_mean_weights(MASK, 5), sequence_mean_weights(CU, MASK, 3), constant_weights(MASK, 17, 3)]
)
def test_positive_nll_by_hand(weights: torch.Tensor) -> None:
    """(1 + 2 + 4 + 5) / 4 tokens of positive responses; the negative one (-3) does not count."""
    logprobs = LOGPROBS.clone().requires_grad_()
    weighted = batch(weights)
    result = positive_nll(logprobs, weighted)
    value = (weights * result.loss).sum()
    value.backward()
    assert float(value.detach()) == pytest.approx(3.0, rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, -1 / 4, -1 / 4, 0, 0, 0, -1 / 4, 0, -1 / 4, 0])
    assert float(result.reduce_metrics(weighted)["actor/nll_loss"]) == pytest.approx(3.0, rel=1e-6)


def test_no_positive_response_gives_zero_loss() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    result = positive_nll(logprobs, batch(token_mean_weights(MASK, 5), -REWARD.abs(), 0))
    result.loss.sum().backward()
    assert not result.loss.any() and logprobs.grad is not None and not logprobs.grad.any()
