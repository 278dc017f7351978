"""The Bradley-Terry loss of reward models."""

import math

import pytest
import torch

from megarl.algorithms.losses import bradley_terry, pair_mean_weights

pytestmark = pytest.mark.alone

F64 = torch.float64
STARTS = torch.tensor([0, 2, 3, 5, 8])  # two pairs: 2 and 1 tokens, 2 and 3 tokens
GROUP = torch.tensor([0, 0, 1, 1])


def test_bradley_terry_by_hand():
    # Scores at last tokens: 1 and 0 in the first pair, -1 and 2 in the second; other tokens have 9.
    scores = torch.tensor([9.0, 1.0, 0.0, 9.0, -1.0, 9.0, 9.0, 2.0], dtype=F64, requires_grad=True)
    result = bradley_terry(scores, STARTS, GROUP)
    losses = [math.log(1 + math.exp(-1.0)), math.log(1 + math.exp(3.0))]  # -log sigmoid of 1 and of -3
    assert result.loss.tolist() == pytest.approx([0, losses[0], 0, 0, losses[1], 0, 0, 0], abs=1e-12)
    assert result.metrics["reward_model/margin"].tolist() == [0, 1, 0, 0, -3, 0, 0, 0]
    assert result.metrics["reward_model/accuracy"].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    weights = pair_mean_weights(STARTS)
    assert weights.tolist() == [0, 0.5, 0, 0, 0.5, 0, 0, 0]
    (weights * result.loss).sum().backward()
    assert scores.grad is not None
    # d/dr_chosen -log sigmoid(r_chosen - r_rejected) = -(1 - sigmoid(margin)), and the opposite for the rejected one.
    slopes = [1 / (1 + math.exp(1.0)) / 2, 1 / (1 + math.exp(-3.0)) / 2]
    expected = [0, -slopes[0], slopes[0], 0, -slopes[1], 0, 0, slopes[1]]
    assert scores.grad.tolist() == pytest.approx(expected, abs=1e-12)


def test_zero_scores_give_log_2():
    result = bradley_terry(torch.zeros(8), STARTS, GROUP)
    weights = pair_mean_weights(STARTS)
    assert float((weights * result.loss).sum()) == pytest.approx(math.log(2))
    assert float((weights * result.metrics["reward_model/accuracy"]).sum()) == 0  # a tie is not correct


def test_large_margins_do_not_overflow():
    scores = torch.tensor([0.0, 500.0, -500.0], requires_grad=True)
    for group_of_chosen, loss in ((torch.tensor([0, 1, 2]), 0.0), (torch.tensor([0, 2, 1]), 1000.0)):
        result = bradley_terry(scores[group_of_chosen], torch.tensor([0, 2, 3]), torch.tensor([4, 4]))
        assert float(result.loss.detach().sum()) == loss


@pytest.mark.parametrize("group", [[0, 1], [0, 0, 1]])
def test_incomplete_pairs_raise(group):
    starts = torch.arange(len(group) + 1)
    with pytest.raises(ValueError, match="not pairs"):
        bradley_terry(torch.zeros(len(group)), starts, torch.tensor(group))


def test_no_pairs_give_no_loss():
    empty = torch.zeros(0, dtype=torch.int64)
    assert bradley_terry(torch.zeros(0), torch.zeros(1, dtype=torch.int64), empty).loss.tolist() == []
    assert pair_mean_weights(torch.zeros(1, dtype=torch.int64)).tolist() == []
