"""Token rewards, and advantages: per sequence (GRPO, RLOO, OPO) and per token (GAE and its variants), with whitening.

Per-sequence functions take and return [N] over all sequences of a batch, or over its episodes if these have several
branches, and give the same result on every rank, without communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megarl.algorithms.token_stats import iter_blocks, masked_select, sequence_sums
from megarl.types import AllReduce, local_all_reduce

Estimator = Literal["grpo", "gdpo", "rloo", "reinforce_pp_baseline", "opo"]


def sequence_advantages(
    estimator: Estimator,
    reward: torch.Tensor,
    group: torch.Tensor,
    actions: torch.Tensor,
    norm_by_std: bool = True,
    excluded: torch.Tensor | None = None,
    parts: Sequence[tuple[float, torch.Tensor]] = (),
) -> torch.Tensor:
    """Return [N] advantages by the estimator `advantage.estimator`. `spread_to_tokens` broadcasts them to tokens.

    reward, group: [N]. actions: [N] action tokens of each. norm_by_std: for `grpo` only. parts: for `gdpo`, which
    reads these instead of `reward`: each part's weight and [N] values. excluded: [N] bool, samples to
    exclude from every mean, deviation and baseline; their reward may be anything, even NaN, and their advantage is 0.
    """
    if estimator == "grpo":
        return group_advantages(reward, group, norm_by_std, excluded)
    if estimator == "gdpo":
        return decoupled_advantages(parts, group, actions, excluded)
    if estimator == "rloo":
        return rloo_advantages(reward, group, excluded)
    if estimator == "reinforce_pp_baseline":
        return whiten_sequences(group_advantages(reward, group, False, excluded), actions, excluded)
    if estimator == "opo":
        return opo_advantages(reward, group, actions, excluded)
    raise ValueError(f"estimator must be grpo, gdpo, rloo, reinforce_pp_baseline or opo, not {estimator!r}")


def group_advantages(
    reward: torch.Tensor, group: torch.Tensor, use_std: bool, excluded: torch.Tensor | None = None
) -> torch.Tensor:
    """Return GRPO's advantages (arXiv:2402.03300, section 4.1.2), [N]: rewards normalized within their group.

    (r - mean) / (std + 1e-6) with the sample standard deviation, or r - mean without `use_std`: Dr. GRPO
    (arXiv:2503.20783). `reward` [N], `group` [N] any integers, in any order. A group with equal rewards, including a
    group of one, carries no signal: its advantages are exactly 0.
    """
    groups = _Groups.build(reward, group, excluded)
    centred = groups.reward - groups.expand(groups.sum_groups(groups.reward) / groups.size.clamp(min=1))
    if use_std:
        variance = groups.sum_groups(centred.square()) / (groups.size - 1).clamp(min=1)
        centred = centred / (groups.expand(variance.sqrt()) + 1e-6)
    return groups.zero_uniform(centred).to(reward.dtype)


def decoupled_advantages(
    parts: Sequence[tuple[float, torch.Tensor]],
    group: torch.Tensor,
    actions: torch.Tensor,
    excluded: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return GDPO's advantages (arXiv:2601.05242, eqs. 4 to 6), [N]: each part of the reward normalized on its own.

        A = whiten_sequences(sum_k w_k (r_k - mean_group(r_k)) / (std_group(r_k) + 1e-6))

    GRPO normalizes the sum, so that combinations of parts with the same sum get the same advantage, and a part with a
    large scale hides the others. Here a weight is the share of a part in the advantage, whatever its scale. A part that
    is equal in a group contributes 0 there.

    parts: weight and [N] values of each part. group: [N]. actions: [N] action tokens of each sample. excluded as in
    `sequence_advantages`.
    """
    total = torch.zeros(len(group), dtype=torch.float64)
    for weight, values in parts:
        total += weight * group_advantages(values.double(), group, True, excluded)
    return whiten_sequences(total, actions, excluded)


def rloo_advantages(reward: torch.Tensor, group: torch.Tensor, excluded: torch.Tensor | None = None) -> torch.Tensor:
    """Return REINFORCE leave-one-out advantages (arXiv:2402.14740), [N]: the baseline is the mean of the k - 1 others.

        A_i = r_i - 1/(k - 1) sum_{j != i} r_j = k/(k - 1) (r_i - mean)

    Groups with equal rewards get 0, as in `group_advantages`.
    """
    groups = _Groups.build(reward, group, excluded)
    size = groups.size.double().clamp(min=2)  # a group of one gets 0 below
    centred = groups.reward - groups.expand(groups.sum_groups(groups.reward) / size)
    return groups.zero_uniform(centred * groups.expand(size / (size - 1))).to(reward.dtype)


def opo_advantages(
    reward: torch.Tensor, group: torch.Tensor, actions: torch.Tensor, excluded: torch.Tensor | None = None
) -> torch.Tensor:
    """Return OPO's advantages (arXiv:2505.23585), [N]: r minus the group's mean reward, weighted by length.

        b = sum_j l_j r_j / sum_j l_j

    This baseline minimizes the variance if the squared norm of a sequence's gradient is proportional to its length.
    `actions` [N]: l, the action tokens. Groups with equal rewards get 0, as in `group_advantages`.
    """
    groups = _Groups.build(reward, group, excluded)
    length = actions.double()
    baseline = groups.sum_groups(length * groups.reward) / groups.sum_groups(length).clamp(min=1)
    return groups.zero_uniform(groups.reward - groups.expand(baseline)).to(reward.dtype)


def penalised_rewards(reward: torch.Tensor, penalty: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Return [N] reward - penalty, for `sequence_advantages` with a KL in the reward; all inputs are [N].

    Groups with equal rewards keep them unchanged, so their advantages are exactly 0. Otherwise the penalties alone
    would differ, and normalization by their deviation would scale them up to the size of rewards, however small.
    """
    return torch.where(_Groups.build(reward, group, None).is_uniform(), reward, reward - penalty)


def whiten_sequences(x: torch.Tensor, actions: torch.Tensor, excluded: torch.Tensor | None = None) -> torch.Tensor:
    """Normalize `x` [N] over the batch, as REINFORCE++ does (arXiv:2501.03262, eq. 10).

    (x - mean) / sqrt(var + 1e-8), each sequence weighted by its action tokens, as `whiten` does for the values at these
    tokens. The result is 0 if all included values are equal.
    """
    is_included = torch.ones_like(actions, dtype=torch.bool) if excluded is None else ~excluded
    values = torch.where(is_included, x.double(), 0.0)
    weight = torch.where(is_included, actions, 0).double()
    weight = weight / weight.sum().clamp(min=1)
    weighted_values = values[weight > 0]
    if not len(weighted_values) or bool(weighted_values.min() == weighted_values.max()):
        return torch.zeros_like(x)
    centred = values - (weight * values).sum()
    scaled = centred * ((weight * centred.square()).sum() + 1e-8).rsqrt()
    return torch.where(is_included, scaled, 0.0).to(x.dtype)


@dataclass(frozen=True)
class _Groups:
    """N samples in G groups. Excluded samples have reward 0 and enter no sum."""

    reward: torch.Tensor  # [N] fp64
    group_ids: torch.Tensor  # [N] in 0..G-1
    is_included: torch.Tensor  # [N] bool
    size: torch.Tensor  # [G] included samples

    @staticmethod
    def build(reward: torch.Tensor, group: torch.Tensor, excluded: torch.Tensor | None) -> _Groups:
        _, group_ids = torch.unique(group, return_inverse=True)
        is_included = torch.ones_like(group_ids, dtype=torch.bool) if excluded is None else ~excluded
        groups = int(group_ids.max()) + 1 if len(group_ids) else 0
        size = torch.bincount(group_ids[is_included], minlength=groups)
        return _Groups(torch.where(is_included, reward.double(), 0.0), group_ids, is_included, size)

    def sum_groups(self, x: torch.Tensor) -> torch.Tensor:
        """[N] -> [G], over included samples."""
        return x.new_zeros(len(self.size)).index_add(0, self.group_ids, torch.where(self.is_included, x, 0.0))

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """[G] -> [N]."""
        return x[self.group_ids]

    def zero_uniform(self, advantages: torch.Tensor) -> torch.Tensor:
        """[N], set to exactly 0 in groups with equal rewards and for excluded samples."""
        return torch.where(self.is_uniform() | ~self.is_included, 0.0, advantages)

    def is_uniform(self) -> torch.Tensor:
        """[N] bool: True if all rewards of the sample's group are equal."""
        initial = self.reward.new_zeros(len(self.size))
        ids, reward = self.group_ids[self.is_included], self.reward[self.is_included]
        lowest = initial.scatter_reduce(0, ids, reward, reduce="amin", include_self=False)
        return self.expand(lowest == initial.scatter_reduce(0, ids, reward, reduce="amax", include_self=False))


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
    critic_lam: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16) over the action tokens of each sequence.

    `rewards`, `values`, `loss_mask` are [T], `cu_seqlens` is [n + 1]; `lam` is a number, or [n] for one per sequence.
    Returns (advantages, returns), both [T], 0 outside the action tokens; returns = advantages + values, with the lambda
    `critic_lam` if it is set (VC-PPO, arXiv:2503.01491): with 1 the critic learns from the rewards to go instead of its
    own values, so that a reward at the end of a long sequence reaches its beginning.

    Only action tokens are steps of the decision process. After a tool call the next state is that of the next action,
    after the tool's response, and gamma and lambda skip the tool's tokens. The end state of a sequence has value 0,
    also if the sequence was truncated.

        delta_k = r_k + gamma * V_{k+1} - V_k,  A_k = delta_k + gamma * lam * A_{k+1}   for action k of a sequence

    For episodes in several branches, pass the `cu_seqlens` of episodes: the action after the last one of a branch is
    then the first one of the next branch. If a branch ended with value 0, the critic would learn that an agent which
    summarizes its history has lost. If each branch got the reward at its end, no action would see the costs and rewards
    of later branches, and no critic would judge a summary.
    """
    if critic_lam is not None:
        args = rewards, values, loss_mask, cu_seqlens, gamma
        return gae(*args, lam)[0], gae(*args, critic_lam)[1]
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    lengths = cu_seqlens.diff().tolist()
    columns = (rewards, values, loss_mask, advantages, returns)
    sequences = list(zip(*(column.split(lengths) for column in columns), strict=True))
    counts = [int(torch.count_nonzero(sequence[2])) for sequence in sequences]
    lams = torch.as_tensor(lam, dtype=torch.float64).expand(len(lengths))
    longest_first = sorted((i for i, count in enumerate(counts) if count), key=lambda i: -counts[i])
    while longest_first:
        block_size = max(1, MAX_BLOCK_STEPS // counts[longest_first[0]])
        block, longest_first = longest_first[:block_size], longest_first[block_size:]
        _compute_block_gae([sequences[i] for i in block], [counts[i] for i in block], gamma, lams[block])
    return advantages, returns


def length_adaptive_lam(actions: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return lambda = 1 - 1 / (alpha l), [n] fp64, for sequences of l action tokens (VAPO, arXiv:2504.05118, sec. 4.2).

    The weights of a sequence's TD errors, lambda^k, then sum to about alpha l: `alpha` (0.05 in the paper) is the share
    of a sequence that counts, independent of its length. Lambda is 0 for l <= 1 / alpha; `actions` [n] are the l.
    """
    return (1.0 - 1.0 / (alpha * actions.double()).clamp(min=1.0)).clamp(min=0.0)


def rewards_to_go(
    rewards: torch.Tensor, loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    """Return the rewards to go of each action token, [T]: sum_{j >= k} gamma^(j - k) r_j over actions; 0 elsewhere.

    For REINFORCE++ (arXiv:2501.03262, eq. 9, with `rewards` from `token_rewards`) and ReMax (arXiv:2310.10505).
    """
    return gae(rewards, torch.zeros_like(rewards), loss_mask, cu_seqlens, gamma, 1.0)[0]


MAX_BLOCK_STEPS = 1 << 24
"""Padded action tokens that `gae` processes at a time, 64 MB in fp32, unless a single sequence has more."""


def _compute_block_gae(
    sequences: list[tuple[torch.Tensor, ...]], counts: list[int], gamma: float, lam: torch.Tensor
) -> None:
    """Write advantages and returns of sequences sorted by decreasing number of actions.

    Each sequence is (rewards, values, mask, advantages, returns), all views. `lam` is fp64, one per sequence. Row k of
    the recursion holds the k-th last action of every sequence, with exhausted sequences at its end.
    """
    longest, first = counts[0], sequences[0][0]
    delta = first.new_zeros(len(sequences), longest)
    action_positions = [mask.nonzero().squeeze(1) for _, _, mask, _, _ in sequences]
    for row, positions, (rewards, values, _, _, _) in zip(delta, action_positions, sequences, strict=True):
        value = values.index_select(0, positions).to(rewards.dtype)
        next_value = torch.cat([value[1:], value.new_zeros(1)])
        row[: len(positions)] = (rewards.index_select(0, positions) + gamma * next_value - value).flip(0)

    steps = delta.t().contiguous()  # [longest, sequences]
    decay = (gamma * lam).to(first)  # [sequences]
    alive = len(sequences) - torch.tensor(counts).bincount().cumsum(0)  # [longest + 1] sequences with over k actions
    next_step = steps[0]
    for step, width in zip(steps[1:].unbind(0), alive[1:].tolist(), strict=False):
        if width < len(next_step):
            next_step, decay = next_step[:width], decay[:width]
        if width < len(step):
            step = step[:width]
        step += next_step * decay  # rounds twice, as written; torch.add(..., alpha=decay) may fuse the roundings
        next_step = step

    delta.copy_(steps.t())
    for row, positions, (_, values, _, advantages, returns) in zip(delta, action_positions, sequences, strict=True):
        advantage = row[: len(positions)].flip(0)
        advantages.index_copy_(0, positions, advantage)
        returns.index_copy_(0, positions, advantage + values.index_select(0, positions).to(advantage.dtype))


def whiten(x: torch.Tensor, mask: torch.Tensor, all_reduce: AllReduce = local_all_reduce) -> torch.Tensor:
    """Normalize `x` [T] to mean 0 and (population) standard deviation 1 over `mask` [T]; 0 elsewhere.

    Mean and deviation cover the entries of all ranks. The result is 0 if these are all equal.
    """
    result = torch.zeros_like(x)
    # In fp32, equal entries would leave rounding noise that the scale amplifies.
    selected = masked_select(x, mask, torch.float64)
    count, entries_sum = all_reduce(torch.stack([selected.new_tensor(len(selected)), selected.sum()]))
    if not count:
        return result
    mean = entries_sum / count
    scale = (all_reduce(selected.sub_(mean).square_().sum()) / count + 1e-8).rsqrt()
    for part, values, part_mask in iter_blocks(result, x, mask):
        part.copy_(torch.where(part_mask, (values.double() - mean) * scale, 0.0))
    return result


def spread_to_tokens(per_sequence: torch.Tensor, cu_seqlens: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """[N] -> [T]: broadcast each sequence's value to its action tokens; 0 elsewhere."""
    spread = per_sequence.new_zeros(len(loss_mask))
    lengths = cu_seqlens.diff().tolist()
    for part, mask, value in zip(spread.split(lengths), loss_mask.split(lengths), per_sequence, strict=True):
        part.masked_fill_(mask, value)
    return spread


def token_rewards(
    sequence_reward: torch.Tensor,
    cu_seqlens: torch.Tensor,
    loss_mask: torch.Tensor,
    kl: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    turn_rewards: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [T] rewards: the outcome on the last action token of each sequence, minus `kl_coef * kl` on each one.

    `sequence_reward` [N], `cu_seqlens` [N + 1], `loss_mask` [T] bool, `kl` [T] nats. `turn_rewards` [T]: the part of
    `sequence_reward` that belongs to turns, at the tokens that receive it; the outcome is the remainder. Without the
    KL, the rewards of a sequence always sum to its `sequence_reward`, unless it has no action token. For episodes in
    several branches pass the `cu_seqlens` of episodes.
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


def overlong_penalty(actions: torch.Tensor, max_length: int, buffer_len: int) -> torch.Tensor:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), [N] fp32, to be added to the reward.

        0                                               where                    l <= max_length - buffer_len
        ((max_length - buffer_len) - l) / buffer_len    where max_length - buffer_len < l <= max_length
        -1                                              where max_length < l

    `actions` [N] action tokens of each sequence; `max_length` (L_max) and `buffer_len` (L_cache) tokens,
    0 < buffer_len <= max_length.
    """
    if not 0 < buffer_len <= max_length:
        raise ValueError(f"buffer_len={buffer_len} is not between 1 and max_length={max_length}")
    return ((max_length - buffer_len - actions) / buffer_len).clamp(-1.0, 0.0).float()


def last_action(cu_seqlens: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return [N] the index into [T] of each sequence's last action token, -1 without one."""
    starts, last = cu_seqlens[:-1].tolist(), []
    for start, mask in zip(starts, loss_mask.split(cu_seqlens.diff().tolist()), strict=True):
        positions = mask.nonzero()
        last.append(start + int(positions[-1, 0]) if len(positions) else -1)
    return torch.tensor(last, dtype=torch.int64, device=cu_seqlens.device)
