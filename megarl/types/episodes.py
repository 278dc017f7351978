"""Episodes: everything that one attempt of an agent produced, which may be several sequences, called branches.

An agent that shortens its history, or continues from an earlier point of it, leaves the engine with sequences that
share a prefix. Each token that the policy sampled is an action in exactly one of them and context in the others. All
branches come from one attempt at the task and earn one reward, so **an episode counts as one** in group statistics, in
means over sequences, in mini-batches and in metrics. The mean over tokens is unaffected: each token occurs once.

A function of sequences becomes a function of episodes by concatenating the branches of an episode in order.
`Episodes.merge_cu_seqlens` turns the cu_seqlens of sequences into those of episodes, so that an episode in several branches gives
the same result as one that stayed whole.

    sequences                    0    1    2    3        of which 1 and 2 are branches of one episode
    row                          0    1    1    2
    action tokens                4    3    5    2        sums(..)   4  8  2
    cu_seqlens                0    10   16   30   35     starts(..) 0  10  30  35
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Branch:
    """Which of an episode's branches a rollout is, and what its client has made of the history.

    Training reads none of it: a branch is trained by the ids that the engine saw, whatever is said here.
    """

    number: int
    """From 0 on, in the order in which their last answers came."""
    forks: int
    """How often the client has left a history that it had begun, in the whole episode: the same on all its branches."""
    has_drifted: bool
    """Whether its last answer would have been asked for with other ids if all before it had been rendered and tokenised
    afresh."""


@dataclass(frozen=True)
class Episodes:
    """Which of N sequences are branches of the same of E episodes. Those of one follow each other, the last one last,
    and are on one rank."""

    episode_ids: torch.Tensor  # [N] int64, the episode of each sequence: from 0 on, by at most one more than before

    @staticmethod
    def from_ids(number: torch.Tensor) -> Episodes:
        """number: [N], the same for branches of one episode, other than that of the sequence before for the first."""
        first = torch.ones(len(number), dtype=torch.bool)
        first[1:] = number[1:] != number[:-1]
        return Episodes(first.cumsum(0) - 1)

    @staticmethod
    def singletons(count: int) -> Episodes:
        """So many sequences, each an episode."""
        return Episodes(torch.arange(count))

    def __len__(self) -> int:
        """E."""
        return int(self.episode_ids[-1]) + 1 if len(self.episode_ids) else 0

    @property
    def sizes(self) -> torch.Tensor:
        """[E] branches of each."""
        return torch.bincount(self.episode_ids, minlength=len(self))

    @property
    def first(self) -> torch.Tensor:
        """[E] the sequence that is the first branch of each."""
        return self.last - self.sizes + 1

    @property
    def last(self) -> torch.Tensor:
        """[E] the sequence that is the last branch of each."""
        return self.sizes.cumsum(0) - 1

    @property
    def is_last(self) -> torch.Tensor:
        """[N] bool."""
        found = torch.zeros(len(self.episode_ids), dtype=torch.bool)
        found[self.last] = True
        return found

    def take_last(self, x: torch.Tensor) -> torch.Tensor:
        """[N] -> [E]: what is the same for all branches, such as the reward."""
        return x[self.last]

    def sum_branches(self, x: torch.Tensor) -> torch.Tensor:
        """[N] -> [E]: added up over the branches."""
        return x.new_zeros(len(self)).index_add(0, self.episode_ids, x)

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """[E] -> [N]: to every branch."""
        return x[self.episode_ids]

    def merge_cu_seqlens(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """[N + 1] -> [E + 1]: where episodes start in tokens of which `cu_seqlens` says where sequences do."""
        return torch.cat([cu_seqlens[:1], cu_seqlens[1:][self.last]])

    def sequence_indices(self, episodes: Sequence[int]) -> list[int]:
        """The branches of these, in their order."""
        first, last = self.first.tolist(), self.last.tolist()
        return [number for one in episodes for number in range(first[one], last[one] + 1)]


def assign_episode_ids(group: torch.Tensor, episode: torch.Tensor, **same: torch.Tensor) -> torch.Tensor:
    """[N] a number that the branches of an episode share, and no other sequence has: that of the first of them.

    group, episode: [N] as of a `Rollout`; below 0 are those alone. same: [N] figures that are an episode's. Raises
    ValueError where branches of one do not follow each other, or differ in these.
    """
    branch, pairs = episode >= 0, torch.stack([group, episode], dim=1)
    if not bool(branch.any()):
        return torch.arange(len(group))
    first = torch.ones_like(branch)
    first[1:] = ~branch[1:] | (pairs[1:] != pairs[:-1]).any(dim=1)
    if len((beginnings := pairs[branch & first]).unique(dim=0)) < len(beginnings):
        raise ValueError("branches of an episode do not follow each other")
    episodes = Episodes(first.cumsum(0) - 1)
    for name, figure in same.items():
        if not torch.equal(episodes.expand(episodes.take_last(figure)), figure):
            raise ValueError(f"branches of an episode have another {name} each")
    return episodes.expand(episodes.first)
