"""Advantages that are one number per sequence: its reward against what was to be expected of its prompt, or of all.

Everything here is [N], of all sequences, and the same on every rank: no rank has to ask another. Where an episode has
several branches, N are the episodes, each with its reward once and the action tokens of all of its branches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["group", "rloo", "reinforce_baseline", "opo"]
"""Names of `sequence_advantages`."""


def sequence_advantages(
    kind: Kind,
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
    groups = _Groups.of(reward, group, left_out)
    centred = groups.reward - groups.each(groups.sums(groups.reward) / groups.size.clamp(min=1))
    if use_std:
        variance = groups.sums(centred.square()) / (groups.size - 1).clamp(min=1)
        centred = centred / (groups.each(variance.sqrt()) + 1e-6)
    return groups.told(centred).to(reward.dtype)


def rloo_advantages(reward: torch.Tensor, group: torch.Tensor, left_out: torch.Tensor | None = None) -> torch.Tensor:
    """REINFORCE leave-one-out (arXiv:2402.14740): the baseline is the mean of the prompt's k - 1 others.

        A_i = r_i - 1/(k - 1) sum_{j != i} r_j = k/(k - 1) (r_i - mean)

    [N]; groups that say nothing as in `group_advantages`.
    """
    groups = _Groups.of(reward, group, left_out)
    size = groups.size.double().clamp(min=2)  # of one nothing is told
    centred = groups.reward - groups.each(groups.sums(groups.reward) / size)
    return groups.told(centred * groups.each(size / (size - 1))).to(reward.dtype)


def opo_advantages(
    reward: torch.Tensor, group: torch.Tensor, actions: torch.Tensor, left_out: torch.Tensor | None = None
) -> torch.Tensor:
    """r minus OPO's baseline (arXiv:2505.23585): the group's mean reward, weighted by length; [N].

        b = sum_j l_j r_j / sum_j l_j

    That is the baseline of least variance where the squared norm of a sequence's gradient grows as its length.
    `actions` [N]: l, its action tokens. Groups that say nothing as in `group_advantages`.
    """
    groups = _Groups.of(reward, group, left_out)
    length = actions.double()
    baseline = groups.sums(length * groups.reward) / groups.sums(length).clamp(min=1)
    return groups.told(groups.reward - groups.each(baseline)).to(reward.dtype)


def penalised_rewards(reward: torch.Tensor, penalty: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """[N] reward - penalty, for `sequence_advantages` with a KL in the reward; all inputs are [N].

    A group whose rewards are all equal keeps them as they are, so that its advantages are exactly 0. Its penalties
    would be all that differs, and divided by their deviation they would count as much as rewards, however small.
    """
    return torch.where(_Groups.of(reward, group, None).is_uniform(), reward, reward - penalty)


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
    row: torch.Tensor  # [N] in 0..G-1
    counted: torch.Tensor  # [N] bool
    size: torch.Tensor  # [G] how many count

    @staticmethod
    def of(reward: torch.Tensor, group: torch.Tensor, left_out: torch.Tensor | None) -> _Groups:
        _, row = torch.unique(group, return_inverse=True)
        counted = torch.ones_like(row, dtype=torch.bool) if left_out is None else ~left_out
        groups = int(row.max()) + 1 if len(row) else 0
        size = torch.bincount(row[counted], minlength=groups)
        return _Groups(torch.where(counted, reward.double(), 0.0), row, counted, size)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """[N] -> [G], of those that count."""
        return x.new_zeros(len(self.size)).index_add(0, self.row, torch.where(self.counted, x, 0.0))

    def each(self, x: torch.Tensor) -> torch.Tensor:
        """[G] -> [N]."""
        return x[self.row]

    def told(self, advantages: torch.Tensor) -> torch.Tensor:
        """[N] with exactly 0 where the group's rewards are all equal, and of those left out."""
        return torch.where(self.is_uniform() | ~self.counted, 0.0, advantages)

    def is_uniform(self) -> torch.Tensor:
        """[N] bool: whether the rewards of the sample's group are all equal."""
        ends = self.reward.new_zeros(2, len(self.size))
        lowest, highest = (
            ends[i].scatter_reduce(0, self.row[self.counted], self.reward[self.counted], reduce=way, include_self=False)
            for i, way in enumerate(("amin", "amax"))
        )
        return self.each(lowest == highest)
