"""Loss weights: means over tokens, sequences and pairs."""

import sys
from pathlib import Path

import pytest
import torch
from thread_ranks import as_ranks

from megarl.algorithms.losses import constant_weights, pair_mean_weights, sequence_mean_weights, token_mean_weights

sys.path.insert(0, str(Path(__file__).parent))

from sharded_batches import random_batch, shard_sequences  # noqa: E402

pytestmark = pytest.mark.alone


def test_token_mean_by_hand():
    weights = token_mean_weights(torch.tensor([0, 1, 1, 0, 1, 1]).bool(), 4)
    assert weights.tolist() == [0, 0.25, 0.25, 0, 0.25, 0.25]
    assert weights.dtype == torch.float32


def test_token_mean_is_not_the_mean_of_sequence_means():
    # One action of loss 1 and three of loss 0, in two sequences: 1/4, where the mean of sequence means is 1/2.
    assert float((token_mean_weights(torch.ones(4).bool(), 4) * torch.tensor([1.0, 0, 0, 0])).sum()) == 0.25


def test_token_mean_without_actions():
    assert token_mean_weights(torch.zeros(3).bool(), 0).tolist() == [0, 0, 0]


def test_sequence_mean_by_hand():
    """Sequences of one, none and three actions: two count, each half."""
    mask = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1]).bool()
    weights = sequence_mean_weights(torch.tensor([0, 2, 4, 8]), mask, 2)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([0, 1 / 2, 0, 0, 1 / 6, 1 / 6, 0, 1 / 6])
    assert sequence_mean_weights(torch.tensor([0, 2]), torch.zeros(2).bool(), 0).tolist() == [0, 0]
    assert sequence_mean_weights(torch.tensor([0]), torch.zeros(0).bool(), 0).tolist() == []


def test_constant_weights_by_hand():
    """Sequences of one, none and three actions: two count; each action has 1 / (5 * 2)."""
    mask = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1]).bool()
    weights = constant_weights(mask, 5, 2)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([0, 0.1, 0, 0, 0.1, 0.1, 0, 0.1])
    assert constant_weights(torch.zeros(2).bool(), 5, 0).tolist() == [0, 0]


def test_sequence_mean_matches_a_loop():
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 1, 9, 4, 12]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    mask, loss = torch.rand(31, generator=generator) < 0.5, torch.randn(31, generator=generator)
    means = [tokens[chosen].mean() for tokens, chosen in zip(loss.split(lengths), mask.split(lengths), strict=True)]
    expected = torch.stack([mean for mean in means if not mean.isnan()]).mean()
    torch.testing.assert_close(
        (sequence_mean_weights(starts, mask, len(means) - sum(mean.isnan() for mean in means)) * loss).sum(), expected
    )


@pytest.mark.parametrize("seed", range(5))
def test_weights_equal_the_formulas_bitwise_on_any_number_of_ranks(seed):
    mask, cu = random_batch(seed)
    sequence = torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff())
    actions = torch.bincount(sequence[mask], minlength=len(cu) - 1)
    token_weights = mask.float() / mask.sum().clamp(min=1)
    sequence_weights = mask * (1.0 / (actions.clamp(min=1) * (actions > 0).sum().clamp(min=1)))[sequence]
    num_tokens, num_sequences = int(mask.sum()), int((actions > 0).sum())
    assert torch.equal(token_mean_weights(mask, num_tokens), token_weights)
    assert torch.equal(sequence_mean_weights(cu, mask, num_sequences), sequence_weights)
    for ranks in (1, 2, 5):
        for _, tokens, starts in shard_sequences(cu, ranks, seed):
            assert torch.equal(token_mean_weights(mask[tokens], num_tokens), token_weights[tokens])
            assert torch.equal(sequence_mean_weights(starts, mask[tokens], num_sequences), sequence_weights[tokens])


def test_pair_mean_counts_pairs_of_all_ranks():
    starts = [torch.tensor([0, 2, 5]), torch.tensor([0]), torch.tensor([0, 1, 2, 4, 5])]
    weights = as_ranks(3, lambda comm: pair_mean_weights(starts[comm.rank], comm.all_reduce).tolist())
    third = float(torch.tensor(1.0 / 3))
    assert weights == [[0, third, 0, 0, 0], [], [third, 0, 0, third, 0]]
    assert pair_mean_weights(starts[2]).tolist() == [0.5, 0, 0, 0.5, 0]
