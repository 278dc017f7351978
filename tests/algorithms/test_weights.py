import pytest
import torch

from megarl.algorithms.weights import sequence_mean_weights, token_mean_weights


def test_by_hand():
    weights = token_mean_weights(torch.tensor([0, 1, 1, 0, 1, 1]).bool(), 4)
    assert weights.tolist() == [0, 0.25, 0.25, 0, 0.25, 0.25]
    assert weights.dtype == torch.float32
    assert token_mean_weights(torch.tensor([0, 1]).bool(), 4).tolist() == [0, 0.25]  # three are elsewhere


def test_mean_over_tokens_not_over_sequences():
    # One action of loss 1 and three of loss 0, in two sequences: 1/4, where the mean of sequence means is 1/2.
    assert float((token_mean_weights(torch.ones(4).bool(), 4) * torch.tensor([1.0, 0, 0, 0])).sum()) == 0.25


def test_no_action():
    assert token_mean_weights(torch.zeros(3).bool(), 0).tolist() == [0, 0, 0]


def test_mean_over_sequences_by_hand():
    """Sequences of one, none and three actions: two count, each half."""
    mask = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1]).bool()
    actions, ids = torch.tensor([1, 0, 3]), torch.tensor([0, 0, 1, 1, 2, 2, 2, 2])
    weights = sequence_mean_weights(actions, ids, mask)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([0, 1 / 2, 0, 0, 1 / 6, 1 / 6, 0, 1 / 6])
    assert torch.equal(sequence_mean_weights(actions, ids[2:], mask[2:]), weights[2:])  # the first is elsewhere
    nothing = torch.zeros(0, dtype=torch.int64)
    assert sequence_mean_weights(torch.tensor([0]), torch.zeros(2).long(), torch.zeros(2).bool()).tolist() == [0, 0]
    assert sequence_mean_weights(nothing, nothing, nothing.bool()).tolist() == []


def test_the_mean_over_sequences_is_that_of_a_loop():
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 1, 9, 4, 12]
    ids = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    mask, loss = torch.rand(31, generator=generator) < 0.5, torch.randn(31, generator=generator)
    means = [one[chosen].mean() for one, chosen in zip(loss.split(lengths), mask.split(lengths), strict=True)]
    expected = torch.stack([mean for mean in means if not mean.isnan()]).mean()
    actions = torch.bincount(ids[mask], minlength=5)
    torch.testing.assert_close((sequence_mean_weights(actions, ids, mask) * loss).sum(), expected)
