"""Aggregation: each token's share of a batch's loss."""

from __future__ import annotations

import torch


def token_mean_weights(loss_mask: torch.Tensor) -> torch.Tensor:
    """[T] fp32 weights that make a sum of token losses their mean: 1 / (number of action tokens) on each of those.

    Give it the whole mini-batch of an optimizer step: the weights then stay right however ranks and micro-batches cut
    it up. All 0 where there is no action token.
    """
    return loss_mask.float() / loss_mask.sum().clamp(min=1)


def sequence_mean_weights(cu_seqlens: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """[T] fp32 weights that make a sum of token losses the mean over sequences of each one's mean over its action
    tokens (arXiv:2402.03300, eq. 3): 1 / (N * action tokens of the sequence) on each of those.

    N counts the sequences that have an action token; others weigh nothing. As above of a whole mini-batch.
    """
    count = len(cu_seqlens) - 1
    sequence = torch.repeat_interleave(torch.arange(count, device=cu_seqlens.device), cu_seqlens.diff())
    actions = torch.bincount(sequence[loss_mask], minlength=count)
    share = 1.0 / (actions.clamp(min=1) * (actions > 0).sum().clamp(min=1))
    return loss_mask * share.float()[sequence]


def pair_mean_weights(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T] fp32 weights that make a sum of `bradley_terry` losses their mean over the pairs: 1 / pairs at the last token
    of each chosen sequence, which are those with even numbers."""
    chosen = cu_seqlens[1:][0::2] - 1
    weights = torch.zeros(int(cu_seqlens[-1]))
    weights[chosen] = 1.0 / max(1, len(chosen))
    return weights
