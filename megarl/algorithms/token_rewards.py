"""Rewards per token from rewards per sequence, and per-sequence sums of token values."""

from __future__ import annotations

import torch


def token_rewards(
    sequence_reward: torch.Tensor,
    cu_seqlens: torch.Tensor,
    loss_mask: torch.Tensor,
    kl: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    turn_rewards: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [T] rewards: the outcome on the last action token of each sequence, minus `kl_coef * kl` on each one.

    `sequence_reward` [N], `cu_seqlens` [N + 1], `loss_mask` [T] bool, `kl` [T] nats (read at action tokens only).
    `turn_rewards` [T]: the part of `sequence_reward` that belongs to turns, at the tokens that receive it (read at
    action tokens only); the outcome is the remainder. Without the KL, the rewards of a sequence always sum to its
    `sequence_reward`. A sequence without an action token gets no reward.

    For episodes in several branches pass the `cu_seqlens` of episodes: the outcome is then on the last action of the
    last branch that has one.
    """
    if kl is None:
        rewards = sequence_reward.new_zeros(len(loss_mask))
    else:
        rewards = (-kl_coef * kl.to(sequence_reward.dtype)).masked_fill_(~loss_mask, 0.0)
    if turn_rewards is not None:
        action_turn_rewards = turn_rewards.to(rewards.dtype).masked_fill(~loss_mask, 0.0)
        rewards = rewards + action_turn_rewards
        sequence_reward = sequence_reward - sequence_sums(action_turn_rewards, cu_seqlens)
    last = last_action(cu_seqlens, loss_mask)
    has_action = last >= 0
    rewards[last[has_action]] += sequence_reward[has_action]  # indices are unique: one last action per sequence
    return rewards


def overlong_penalty(actions: torch.Tensor, max_length: int, buffer: int) -> torch.Tensor:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), [N] fp32, to be added to the reward.

        0                                       where                l <= max_length - buffer
        ((max_length - buffer) - l) / buffer    where max_length - buffer < l <= max_length
        -1                                      where max_length < l

    `actions` [N] action tokens of each sequence; `max_length` (L_max) and `buffer` (L_cache) tokens,
    0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the buffer of {buffer} tokens is not between 1 and the {max_length} that an answer may have")
    return ((max_length - buffer - actions) / buffer).clamp(-1.0, 0.0).float()


def last_action(cu_seqlens: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return [N] the index into [T] of each sequence's last action token, -1 without one."""
    starts, last = cu_seqlens[:-1].tolist(), []
    for start, mask in zip(starts, loss_mask.split(cu_seqlens.diff().tolist()), strict=True):
        positions = mask.nonzero()
        last.append(start + int(positions[-1, 0]) if len(positions) else -1)
    return torch.tensor(last, dtype=torch.int64, device=cu_seqlens.device)


def sequence_sums(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T] -> [N]: sum over each sequence's tokens, sequentially and in the dtype of `x`."""
    lengths = cu_seqlens.diff().tolist()
    sums = x.new_zeros(len(lengths))
    zero_index = torch.zeros(max(lengths, default=0), dtype=torch.int64, device=x.device)
    for total, part in zip(sums.split(1), x.split(lengths), strict=False):  # empty `sums` still split into one part
        total.index_add_(0, zero_index[: len(part)], part)
    return sums
