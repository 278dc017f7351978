"""Advantages, per sequence (GRPO, RLOO, OPO) and per token (GAE and its variants), and whitening.

Functions of sequences take and return [N] over all sequences of a batch and give the same result on every rank, without
communication. Where an episode has several branches, N counts episodes: each has its reward once, and the action tokens
of all of its branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from megarl.algorithms.token_stats import iter_blocks, masked_select
from megarl.types import AllReduce, local_all_reduce

Estimator = Literal["group", "rloo", "reinforce_baseline", "opo"]
"""Names of `sequence_advantages`."""


def sequence_advantages(
    kind: Estimator,
    reward: torch.Tensor,
    group: torch.Tensor,
    actions: torch.Tensor,
    group_std: bool = True,
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N] advantages of the kind that `advantage.kind` names; `spread_to_tokens` puts them on the tokens.

    reward, group: [N]. actions: [N] action tokens of each. group_std: of `group` only. left_out: [N] bool, those that
    count in no mean, deviation or baseline, whose reward may be anything, NaN too; their advantage is 0.
    """
    if kind == "group":
        return group_advantages(reward, group, group_std, left_out)
    if kind == "rloo":
        return rloo_advantages(reward, group, left_out)
    if kind == "reinforce_baseline":
        return whiten_sequences(group_advantages(reward, group, False, left_out), actions, left_out)
    if kind == "opo":
        return opo_advantages(reward, group, actions, left_out)
    raise ValueError(f"kind must be group, rloo, reinforce_baseline or opo, not {kind!r}")


def group_advantages(
    reward: torch.Tensor, group: torch.Tensor, use_std: bool, left_out: torch.Tensor | None = None
) -> torch.Tensor:
    """GRPO's advantages (arXiv:2402.03300, section 4.1.2): each reward against those of the same prompt; [N].

    (r - mean) / (std + 1e-6) with the sample standard deviation, or r - mean without `use_std`: Dr. GRPO
    (arXiv:2503.20783). `reward` [N], `group` [N] any integers, in any order. A group whose rewards are all
    equal, so also a group of one, says nothing about what is better: exactly 0.
    """
    groups = _Groups.build(reward, group, left_out)
    centred = groups.reward - groups.expand(groups.sum_groups(groups.reward) / groups.size.clamp(min=1))
    if use_std:
        variance = groups.sum_groups(centred.square()) / (groups.size - 1).clamp(min=1)
        centred = centred / (groups.expand(variance.sqrt()) + 1e-6)
    return groups.zero_uniform(centred).to(reward.dtype)


def rloo_advantages(reward: torch.Tensor, group: torch.Tensor, left_out: torch.Tensor | None = None) -> torch.Tensor:
    """REINFORCE leave-one-out (arXiv:2402.14740): the baseline is the mean of the prompt's k - 1 others.

        A_i = r_i - 1/(k - 1) sum_{j != i} r_j = k/(k - 1) (r_i - mean)

    [N]; groups that say nothing as in `group_advantages`.
    """
    groups = _Groups.build(reward, group, left_out)
    size = groups.size.double().clamp(min=2)  # of one nothing is told
    centred = groups.reward - groups.expand(groups.sum_groups(groups.reward) / size)
    return groups.zero_uniform(centred * groups.expand(size / (size - 1))).to(reward.dtype)


def opo_advantages(
    reward: torch.Tensor, group: torch.Tensor, actions: torch.Tensor, left_out: torch.Tensor | None = None
) -> torch.Tensor:
    """r minus OPO's baseline (arXiv:2505.23585): the group's mean reward, weighted by length; [N].

        b = sum_j l_j r_j / sum_j l_j

    That is the baseline of least variance where the squared norm of a sequence's gradient grows as its length.
    `actions` [N]: l, its action tokens. Groups that say nothing as in `group_advantages`.
    """
    groups = _Groups.build(reward, group, left_out)
    length = actions.double()
    baseline = groups.sum_groups(length * groups.reward) / groups.sum_groups(length).clamp(min=1)
    return groups.zero_uniform(groups.reward - groups.expand(baseline)).to(reward.dtype)


def penalised_rewards(reward: torch.Tensor, penalty: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """[N] reward - penalty, for `sequence_advantages` with a KL in the reward; all inputs are [N].

    A group whose rewards are all equal keeps them as they are, so that its advantages are exactly 0. Its penalties
    would be all that differs, and divided by their deviation they would count as much as rewards, however small.
    """
    return torch.where(_Groups.build(reward, group, None).is_uniform(), reward, reward - penalty)


def whiten_sequences(x: torch.Tensor, actions: torch.Tensor, left_out: torch.Tensor | None = None) -> torch.Tensor:
    """REINFORCE++'s normalisation over the batch (arXiv:2501.03262, eq. 10) of a number per sequence, [N].

    (x - mean) / sqrt(var + 1e-8), where each counts with its action tokens: the same as `whiten` of the numbers on all
    these tokens. Where all that count are equal the result is 0.
    """
    counted = torch.ones_like(actions, dtype=torch.bool) if left_out is None else ~left_out
    numbers = torch.where(counted, x.double(), 0.0)
    weight = torch.where(counted, actions, 0).double()
    weight = weight / weight.sum().clamp(min=1)
    there = numbers[weight > 0]
    if not len(there) or bool(there.min() == there.max()):
        return torch.zeros_like(x)
    centred = numbers - (weight * numbers).sum()
    scaled = centred * ((weight * centred.square()).sum() + 1e-8).rsqrt()
    return torch.where(counted, scaled, 0.0).to(x.dtype)


@dataclass(frozen=True)
class _Groups:
    """Samples of G prompts. Those that are left out have reward 0 and are in no sum."""

    reward: torch.Tensor  # [N] fp64
    group_ids: torch.Tensor  # [N] in 0..G-1
    is_included: torch.Tensor  # [N] bool
    size: torch.Tensor  # [G] how many count

    @staticmethod
    def build(reward: torch.Tensor, group: torch.Tensor, left_out: torch.Tensor | None) -> _Groups:
        _, row = torch.unique(group, return_inverse=True)
        counted = torch.ones_like(row, dtype=torch.bool) if left_out is None else ~left_out
        groups = int(row.max()) + 1 if len(row) else 0
        size = torch.bincount(row[counted], minlength=groups)
        return _Groups(torch.where(counted, reward.double(), 0.0), row, counted, size)

    def sum_groups(self, x: torch.Tensor) -> torch.Tensor:
        """[N] -> [G], of those that count."""
        return x.new_zeros(len(self.size)).index_add(0, self.group_ids, torch.where(self.is_included, x, 0.0))

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """[G] -> [N]."""
        return x[self.group_ids]

    def zero_uniform(self, advantages: torch.Tensor) -> torch.Tensor:
        """[N] with exactly 0 where the group's rewards are all equal, and of those left out."""
        return torch.where(self.is_uniform() | ~self.is_included, 0.0, advantages)

    def is_uniform(self) -> torch.Tensor:
        """[N] bool: whether the rewards of the sample's group are all equal."""
        ends = self.reward.new_zeros(2, len(self.size))
        lowest, highest = (
            ends[i].scatter_reduce(
                0, self.group_ids[self.is_included], self.reward[self.is_included], reduce=way, include_self=False
            )
            for i, way in enumerate(("amin", "amax"))
        )
        return self.expand(lowest == highest)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) over the action tokens of each sequence.

    `rewards`, `values`, `loss_mask` are [T], `cu_seqlens` [n + 1]; `lam` one for all, or [n] for each sequence its own.
    Returns (advantages, returns), both [T], 0 outside of the action tokens; returns = advantages + values.

    Only action tokens are steps of the decision process: the state after an action that a tool answers is the state of
    the next action, behind the answer, and neither gamma nor lambda count the tool's tokens. After a sequence's last
    action nothing follows, also where it was cut off at its length: the value of that end state is 0.

        delta_k = r_k + gamma * V_{k+1} - V_k,  A_k = delta_k + gamma * lam * A_{k+1}   for action k of a sequence

    Of episodes in several branches it is given the `cu_seqlens` of episodes, so that the action after the last one of a
    branch is the first one of the next. That is what came after it: the agent went on, from a history that it had
    shortened or gone back in, and V_{k+1} is the critic's word on the state that it made of it. Were a branch's end an
    end with nothing behind it, the critic would be taught that an agent which sums up what it knows has lost. Were the
    reward at each branch's end, as if it were an episode by itself, no action would be told of what later branches cost
    or were paid, such as their KL and their turns' rewards, and a summary would be judged by no critic.
    """
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    lengths = cu_seqlens.diff().tolist()
    columns = (rewards, values, loss_mask, advantages, returns)
    sequences = list(zip(*(column.split(lengths) for column in columns), strict=True))
    counts = [int(torch.count_nonzero(sequence[2])) for sequence in sequences]
    each = torch.as_tensor(lam, dtype=torch.float64).expand(len(lengths))
    for block in _split_blocks(counts):
        _compute_block_gae([sequences[i] for i in block], [counts[i] for i in block], gamma, each[block])
    return advantages, returns


def decoupled_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
    critic_lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages of one lambda for the policy, returns of another for the critic (VC-PPO, arXiv:2503.01491).

    With `critic_lam` 1 the critic learns from the rewards still to come and not from its own values, so that a reward
    at the end of a long sequence reaches its beginning. Otherwise as `gae`.
    """
    advantages, _ = gae(rewards, values, loss_mask, cu_seqlens, gamma, lam)
    _, returns = gae(rewards, values, loss_mask, cu_seqlens, gamma, critic_lam)
    return advantages, returns


def length_adaptive_lam(actions: torch.Tensor, alpha: float) -> torch.Tensor:
    """[n] fp64, lambda = 1 - 1 / (alpha l) of sequences of l action tokens (VAPO, arXiv:2504.05118, section 4.2).

    The weights of a sequence's TD errors, lambda^k, then add up to about alpha l: `alpha` (0.05 there) says how much of
    a sequence counts, whatever its length. Of l <= 1 / alpha it is 0; `actions` [n] are the l.
    """
    return (1.0 - 1.0 / (alpha * actions.double()).clamp(min=1.0)).clamp(min=0.0)


def rewards_to_go(
    rewards: torch.Tensor, loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    """[T] return of each action token, sum_{j >= k} gamma^(j - k) r_j over the actions of its sequence; 0 elsewhere.

    REINFORCE++ (arXiv:2501.03262, eq. 9: r - coef sum_{i >= t} KL_i, with `rewards` of `token_rewards`) and ReMax
    (arXiv:2310.10505). It is `gae` with values of 0 and lambda 1; `rewards`, `loss_mask` [T], `cu_seqlens` [n + 1].
    """
    return gae(rewards, torch.zeros_like(rewards), loss_mask, cu_seqlens, gamma, 1.0)[0]


MAX_BLOCK_STEPS = 1 << 24
"""Actions of the sequences that `gae` goes through together: 64 MB in fp32."""


def _split_blocks(counts: list[int]) -> Iterator[list[int]]:
    """The numbers of those that have actions, most actions first, so many at a time that a rectangle of them, each with
    as many actions as the first, has `STEPS`; at least one."""
    order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: -counts[i])
    while order:
        together = max(1, MAX_BLOCK_STEPS // counts[order[0]])
        yield order[:together]
        order = order[together:]


def _compute_block_gae(
    sequences: list[tuple[torch.Tensor, ...]], counts: list[int], gamma: float, lam: torch.Tensor
) -> None:
    """Writes advantages and returns of sequences, each (rewards, values, mask, advantages, returns) as views, of which
    the first has the most actions and each next one at most as many as the one before; `lam` fp64, of each.

    Only the recursion itself goes step by step, with the steps as rows, the last action of each sequence in row 0: a
    row then is what one step of all sequences needs, and those that have no action left are at its end.
    """
    longest, first = counts[0], sequences[0][0]
    delta = first.new_zeros(len(sequences), longest)
    places = [mask.nonzero().squeeze(1) for _, _, mask, _, _ in sequences]
    for row, place, (rewards, values, _, _, _) in zip(delta, places, sequences, strict=True):
        value = values.index_select(0, place).to(rewards.dtype)
        following = torch.cat([value[1:], value.new_zeros(1)])
        row[: len(place)] = (rewards.index_select(0, place) + gamma * following - value).flip(0)

    steps = delta.t().contiguous()  # [longest, sequences]
    decay = (gamma * lam).to(first)  # [sequences]
    alive = len(sequences) - torch.tensor(counts).bincount().cumsum(0)  # [longest + 1] that have more than k actions
    before = steps[0]
    for step, width in zip(steps[1:].unbind(0), alive[1:].tolist(), strict=False):
        if width < len(before):
            before, decay = before[:width], decay[:width]
        if width < len(step):
            step = step[:width]
        step += before * decay  # two roundings, as written; torch.add(..., alpha=decay) may fuse them into one
        before = step

    delta.copy_(steps.t())
    for row, place, (_, values, _, advantages, returns) in zip(delta, places, sequences, strict=True):
        advantage = row[: len(place)].flip(0)
        advantages.index_copy_(0, place, advantage)
        returns.index_copy_(0, place, advantage + values.index_select(0, place).to(advantage.dtype))


def whiten(x: torch.Tensor, mask: torch.Tensor, total: AllReduce = local_all_reduce) -> torch.Tensor:
    """`x` [T] shifted and scaled to mean 0 and (population) standard deviation 1 over `mask` [T]; 0 elsewhere.

    Mean and deviation are those of all ranks' entries. Where these are all equal the result is 0.
    """
    result = torch.zeros_like(x)
    chosen = masked_select(
        x, mask, torch.float64
    )  # fp32 would leave rounding noise of equal entries, which the scale blows up
    count, entries = total(torch.stack([chosen.new_tensor(len(chosen)), chosen.sum()]))
    if not count:
        return result
    mean = entries / count
    scale = (total(chosen.sub_(mean).square_().sum()) / count + 1e-8).rsqrt()
    for part, numbers, where in iter_blocks(result, x, mask):
        part.copy_(torch.where(where, (numbers.double() - mean) * scale, 0.0))
    return result


def spread_to_tokens(per_sequence: torch.Tensor, cu_seqlens: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """[N] -> [T]: each sequence's number on all its action tokens, 0 elsewhere."""
    spread = per_sequence.new_zeros(len(loss_mask))
    lengths = cu_seqlens.diff().tolist()
    for part, mask, number in zip(spread.split(lengths), loss_mask.split(lengths), per_sequence, strict=True):
        part.masked_fill_(mask, number)
    return spread
