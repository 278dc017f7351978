"""Aggregation: each token's share of a batch's loss."""

from __future__ import annotations

import torch


def token_mean_weights(loss_mask: torch.Tensor, actions: int) -> torch.Tensor:
    """[T] fp32 weights that make a sum of token losses their mean: 1 / (number of action tokens) on each of those.

    actions: of the whole mini-batch of an optimizer step, of which the mask may be a part: so the weights are right
    however ranks and micro-batches cut it up. All 0 where there is none.
    """
    return loss_mask.float() / max(actions, 1)


def sequence_mean_weights(actions: torch.Tensor, sequence_ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """[T] fp32 weights that make a sum of token losses the mean over sequences of each one's mean over its action
    tokens (arXiv:2402.03300, eq. 3): 1 / (N * action tokens of the sequence) on each of those.

    actions: [N] int64, action tokens of each sequence of the whole mini-batch; sequence_ids: [T], which of them a token
    is of. N counts those that have an action token; others weigh nothing.
    """
    share = 1.0 / (actions.clamp(min=1) * (actions > 0).sum().clamp(min=1))
    return loss_mask * share.float()[sequence_ids]


def pair_mean_weights(own: torch.Tensor, cu_seqlens: torch.Tensor, pairs: int) -> torch.Tensor:
    """[T] fp32 weights that make a sum of `bradley_terry` losses their mean over the pairs: 1 / pairs at the last token
    of each chosen sequence, which are those with even numbers.

    own: [n], the numbers of the sequences that `cu_seqlens`, [n + 1], is about.
    """
    chosen = cu_seqlens[1:][own % 2 == 0] - 1
    weights = torch.zeros(int(cu_seqlens[-1]))
    weights[chosen] = 1.0 / max(1, pairs)
    return weights
