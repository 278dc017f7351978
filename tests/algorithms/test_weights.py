import torch

from megarl.algorithms.weights import token_mean_weights


def test_by_hand():
    weights = token_mean_weights(torch.tensor([0, 1, 1, 0, 1, 1]).bool())
    assert weights.tolist() == [0, 0.25, 0.25, 0, 0.25, 0.25]
    assert weights.dtype == torch.float32


def test_mean_over_tokens_not_over_sequences():
    # One action of loss 1 and three of loss 0, in two sequences: 1/4, where the mean of sequence means is 1/2.
    assert float((token_mean_weights(torch.ones(4).bool()) * torch.tensor([1.0, 0, 0, 0])).sum()) == 0.25


def test_no_action():
    assert token_mean_weights(torch.zeros(3).bool()).tolist() == [0, 0, 0]
