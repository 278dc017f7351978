"""Aggregation: each token's share of a batch's loss."""

from __future__ import annotations

import torch

from megarl.types import Total, alone


def token_mean_weights(loss_mask: torch.Tensor, actions: int) -> torch.Tensor:
    """[T] fp32 weights that make a sum of token losses their mean: 1 / (number of action tokens) on each of those.

    actions: of the whole mini-batch of an optimizer step, of which a rank has a share: the weights stay right however
    ranks and micro-batches cut it up. All 0 where there is no action token.
    """
    return loss_mask.float().div_(max(actions, 1))


def sequence_mean_weights(cu_seqlens: torch.Tensor, loss_mask: torch.Tensor, sequences: int) -> torch.Tensor:
    """[T] fp32 weights that make a sum of token losses the mean over sequences of each one's mean over its action
    tokens (arXiv:2402.03300, eq. 3): 1 / (N * action tokens of the sequence) on each of those.

    sequences: N, those of the whole mini-batch that have an action token; others weigh nothing. Of episodes in several
    branches (`types.Episodes`), which count as one each, `cu_seqlens` are those of episodes, and N counts these.
    """
    lengths = cu_seqlens.diff().tolist()
    masks = loss_mask.split(lengths)
    actions = torch.tensor([int(torch.count_nonzero(mask)) for mask in masks], dtype=torch.int64)
    share = 1.0 / (actions.clamp(min=1) * max(sequences, 1))
    weights = torch.zeros(len(loss_mask))
    for part, mask, number in zip(weights.split(lengths), masks, share, strict=True):
        part.masked_fill_(mask, number)
    return weights


def constant_weights(loss_mask: torch.Tensor, length: int, sequences: int) -> torch.Tensor:
    """[T] fp32 weights that make a sum of token losses the mean over sequences of each one's sum over its action
    tokens, divided by a constant: 1 / (length * N) on each action token.

    Dr. GRPO (arXiv:2503.20783, listing 1), whose constant is the tokens that may be generated: a token of a long answer
    counts no less than one of a short one. sequences: N as of `sequence_mean_weights`.
    """
    return loss_mask.float().div_(length * max(sequences, 1))


def pair_mean_weights(cu_seqlens: torch.Tensor, total: Total = alone) -> torch.Tensor:
    """[T] fp32 weights that make a sum of `bradley_terry` losses their mean over the pairs: 1 / pairs at the last token
    of each chosen sequence, which are those with even numbers. A share of the pairs has whole ones."""
    chosen = cu_seqlens[1:][0::2] - 1
    weights = torch.zeros(int(cu_seqlens[-1]))
    weights[chosen] = 1.0 / max(1, int(total(chosen.new_tensor(len(chosen)))))
    return weights
