"""How much better than expected each action token was: GAE for PPO, group-relative advantages for GRPO."""

from __future__ import annotations

from typing import Any

import torch


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) over the action tokens of each sequence.

    `rewards`, `values`, `loss_mask` are [T], `cu_seqlens` [N + 1]. Returns (advantages, returns), both [T], 0 outside
    of the action tokens; returns = advantages + values.

    Only action tokens are steps of the decision process: the state after an action that a tool answers is the state of
    the next action, behind the answer, and neither gamma nor lambda count the tool's tokens. After a sequence's last
    action nothing follows, also where it was cut off at its length: the value of that end state is 0.

        delta_k = r_k + gamma * V_{k+1} - V_k,  A_k = delta_k + gamma * lam * A_{k+1}   for action k of a sequence
    """
    index = loss_mask.nonzero().squeeze(1)  # [A] where the action tokens are
    count = len(cu_seqlens) - 1
    sequence = torch.repeat_interleave(torch.arange(count, device=cu_seqlens.device), cu_seqlens.diff())[index]  # [A]
    actions = torch.bincount(sequence, minlength=count)  # [N]
    # Which action of its sequence each one is: its place among all actions less the place of the sequence's first.
    step = torch.arange(len(index), device=index.device) - (actions.cumsum(0) - actions)[sequence]
    longest = int(actions.max()) if count else 0

    # Steps as rows, so that the loop runs over the longest sequence's actions with [N] vectors. Behind a sequence's
    # last action reward and value are 0, and so is everything that the recursion makes of them.
    reward = rewards.new_zeros(longest + 1, count)
    value = rewards.new_zeros(longest + 1, count)
    reward[step, sequence] = rewards[index]
    value[step, sequence] = values[index].to(rewards.dtype)
    advantage = torch.zeros_like(reward)
    for k in reversed(range(longest)):
        delta = reward[k] + gamma * value[k + 1] - value[k]
        advantage[k] = delta + gamma * lam * advantage[k + 1]

    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    advantages[index] = advantage[step, sequence]
    returns[index] = (advantage + value)[step, sequence]
    return advantages, returns


def whiten(x: torch.Tensor, mask: torch.Tensor, total: Any = None) -> torch.Tensor:
    """`x` [T] shifted and scaled to mean 0 and (population) standard deviation 1 over `mask` [T]; 0 elsewhere.

    Where all entries are equal the result is 0.
    """
    result = torch.zeros_like(x)
    if not bool(mask.any()):
        return result
    chosen = x[mask].double()  # fp32 would leave rounding noise of equal entries, which the division blows up
    centred = chosen - chosen.mean()
    result[mask] = (centred * (centred.square().mean() + 1e-8).rsqrt()).to(x.dtype)
    return result


def group_advantages(sequence_reward: torch.Tensor, group: torch.Tensor, use_std: bool) -> torch.Tensor:
    """GRPO's advantages (arXiv:2402.03300, section 4.1.2): each reward against those of the same prompt; [N].

    (r - mean) / (std + 1e-6) with the sample standard deviation, or r - mean without `use_std` (arXiv:2503.20783).
    `sequence_reward` [N], `group` [N] any integers, in any order. A group whose rewards are all equal, so also a group
    of one, says nothing about what is better: exactly 0.
    """
    if not len(group):
        return torch.zeros_like(sequence_reward)
    _, row = torch.unique(group, return_inverse=True)  # [N] in 0..G-1
    groups = int(row.max()) + 1
    reward = sequence_reward.double()
    zeros = reward.new_zeros(groups)
    size = torch.bincount(row, minlength=groups)
    centred = reward - (zeros.index_add(0, row, reward) / size)[row]
    if use_std:
        variance = zeros.index_add(0, row, centred.square()) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[row] + 1e-6)
    lowest = zeros.scatter_reduce(0, row, reward, reduce="amin", include_self=False)
    highest = zeros.scatter_reduce(0, row, reward, reduce="amax", include_self=False)
    centred[(lowest == highest)[row]] = 0.0
    return centred.to(sequence_reward.dtype)


def spread_to_tokens(per_sequence: torch.Tensor, sequence_ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """[N] -> [T]: each sequence's number on all its action tokens, 0 elsewhere. sequence_ids: [T], whose each is."""
    spread = per_sequence[sequence_ids]
    return torch.where(loss_mask, spread, torch.zeros_like(spread))
