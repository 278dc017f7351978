"""From one number per rollout to one per token, and back."""

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
    """[T] rewards: the outcome on the last action token of each sequence, minus `kl_coef * kl` on each action token.

    `sequence_reward` [N], `cu_seqlens` [N + 1], `loss_mask` [T] bool, `kl` [T] nats (only its action tokens are read).
    `turn_rewards` [T]: the part of `sequence_reward` that belongs to single turns, where each is to be (only action
    tokens are read); the outcome is the rest of it. So a sequence's rewards without the KL add up to its
    `sequence_reward` in any case. A sequence without an action token gets no reward anywhere.

    Of episodes in several branches all of this is said with the `cu_seqlens` of episodes: the outcome is on the last
    action of the last branch that has one.
    """
    if kl is None:
        rewards = sequence_reward.new_zeros(len(loss_mask))
    else:
        rewards = (-kl_coef * kl.to(sequence_reward.dtype)).masked_fill_(~loss_mask, 0.0)
    if turn_rewards is not None:
        placed = turn_rewards.to(rewards.dtype).masked_fill(~loss_mask, 0.0)
        rewards = rewards + placed
        sequence_reward = sequence_reward - sequence_sums(placed, cu_seqlens)
    last = last_action(cu_seqlens, loss_mask)
    has_action = last >= 0
    rewards[last[has_action]] += sequence_reward[has_action]  # no index twice: one last action per sequence
    return rewards


def overlong_penalty(actions: torch.Tensor, most: int, buffer: int) -> torch.Tensor:
    """[N] fp32, DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), which is added to the reward.

        0                                 where          l <= most - buffer
        ((most - buffer) - l) / buffer    where most - buffer < l <= most
        -1                                where most < l

    `actions` [N] action tokens of each sequence; `most`, `buffer` tokens, 0 < buffer <= most (L_max, L_cache).
    """
    if not 0 < buffer <= most:
        raise ValueError(f"the buffer of {buffer} tokens is not between 1 and the {most} that an answer may have")
    return ((most - buffer - actions) / buffer).clamp(-1.0, 0.0).float()


def last_action(cu_seqlens: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """[N] index into [T] of the last action token of each sequence, -1 where there is none."""
    starts, last = cu_seqlens[:-1].tolist(), []
    for start, mask in zip(starts, loss_mask.split(cu_seqlens.diff().tolist()), strict=True):
        places = mask.nonzero()
        last.append(start + int(places[-1, 0]) if len(places) else -1)
    return torch.tensor(last, dtype=torch.int64, device=cu_seqlens.device)


def sequence_sums(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T] -> [N]: the sum over each sequence's tokens, one after the other in the dtype of `x`."""
    lengths = cu_seqlens.diff().tolist()
    sums = x.new_zeros(len(lengths))
    onto = torch.zeros(max(lengths, default=0), dtype=torch.int64, device=x.device)
    for one, part in zip(sums.split(1), x.split(lengths), strict=False):  # of no sequences, one empty sum
        one.index_add_(0, onto[: len(part)], part)
    return sums
