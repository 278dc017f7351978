"""From one number per rollout to one per token."""

from __future__ import annotations

import torch


def token_rewards(
    sequence_reward: torch.Tensor,
    cu_seqlens: torch.Tensor,
    loss_mask: torch.Tensor,
    kl: torch.Tensor | None = None,
    kl_coef: float = 0.0,
) -> torch.Tensor:
    """[T] rewards: the outcome on the last action token of each sequence, minus `kl_coef * kl` on each action token.

    `sequence_reward` [N], `cu_seqlens` [N + 1], `loss_mask` [T] bool, `kl` [T] nats (only its action tokens are read).
    A sequence without an action token gets no reward anywhere.
    """
    rewards = torch.zeros(len(loss_mask), dtype=sequence_reward.dtype, device=sequence_reward.device)
    if kl is not None:
        rewards[loss_mask] = -kl_coef * kl[loss_mask].to(rewards.dtype)
    last = last_action(cu_seqlens, loss_mask)
    has_action = last >= 0
    rewards[last[has_action]] += sequence_reward[has_action]  # no index twice: one last action per sequence
    return rewards


def last_action(cu_seqlens: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """[N] index into [T] of the last action token of each sequence, -1 where there is none."""
    count = len(cu_seqlens) - 1
    sequence = torch.repeat_interleave(torch.arange(count, device=cu_seqlens.device), cu_seqlens.diff())
    index = loss_mask.nonzero().squeeze(1)
    none = torch.full((count,), -1, dtype=torch.int64, device=cu_seqlens.device)
    return none.scatter_reduce(0, sequence[index], index, reduce="amax")
