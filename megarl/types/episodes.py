"""Episodes: everything that one attempt of an agent produced, which may be several sequences, called branches.

An agent that shortens its history, or continues from an earlier point of it, leaves the engine with sequences that
share a prefix. Each token that the policy sampled is an action in exactly one of them and context in the others. All
branches come from one attempt at the task and earn one reward, so **an episode counts as one** in group statistics, in
means over sequences, in mini-batches and in metrics. The mean over tokens is unaffected: each token occurs once.

A function of sequences becomes a function of episodes by concatenating the branches of an episode in order.
`Episodes.merge_cu_seqlens` turns the cu_seqlens of sequences into those of episodes, so that an episode in several
branches gives the same result as one that stayed whole.

    sequences                    0    1    2    3        1 and 2 are branches of one episode
    episode_ids                  0    1    1    2
    action tokens                4    3    5    2        sum_branches(..)      4  8  2
    cu_seqlens                0    10   16   30   35     merge_cu_seqlens(..)  0  10  30  35
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Branch:
    """Position of a rollout among the branches of its episode, and how its client changed the history; for logging."""

    number: int  # from 0, in the order of the branches' last responses
    forks: int  # how often the client left a history that it had begun, over the whole episode
    has_drifted: bool
    """Whether rendering and tokenizing the history from scratch would have given other ids in the last request."""


@dataclass(frozen=True)
class Episodes:
    """The mapping of N sequences to E episodes. Branches of an episode are adjacent, in order, and on one rank."""

    episode_ids: torch.Tensor  # [N] int64, the episode of each sequence: starts at 0, each entry grows by at most 1

    @staticmethod
    def from_ids(ids: torch.Tensor) -> Episodes:
        """Build from `ids` [N]: branches of an episode share a number, adjacent episodes have different ones."""
        first = torch.ones(len(ids), dtype=torch.bool)
        first[1:] = ids[1:] != ids[:-1]
        return Episodes(first.cumsum(0) - 1)

    def __len__(self) -> int:
        """E."""
        return int(self.episode_ids[-1]) + 1 if len(self.episode_ids) else 0

    @property
    def sizes(self) -> torch.Tensor:
        """[E] number of branches."""
        return torch.bincount(self.episode_ids, minlength=len(self))

    @property
    def first(self) -> torch.Tensor:
        """[E] index of the first branch."""
        return self.last - self.sizes + 1

    @property
    def last(self) -> torch.Tensor:
        """[E] index of the last branch."""
        return self.sizes.cumsum(0) - 1

    @property
    def is_last(self) -> torch.Tensor:
        """[N] bool, True for last branches."""
        is_last = torch.zeros(len(self.episode_ids), dtype=torch.bool)
        is_last[self.last] = True
        return is_last

    def take_last(self, x: torch.Tensor) -> torch.Tensor:
        """[N] -> [E]: take a value that all branches share, such as the reward."""
        return x[self.last]

    def sum_branches(self, x: torch.Tensor) -> torch.Tensor:
        """[N] -> [E]: sum over the branches."""
        return x.new_zeros(len(self)).index_add(0, self.episode_ids, x)

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """[E] -> [N]: copy to every branch."""
        return x[self.episode_ids]

    def merge_cu_seqlens(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """[N + 1] -> [E + 1]: turn the token offsets of sequences into those of episodes."""
        return torch.cat([cu_seqlens[:1], cu_seqlens[1:][self.last]])

    def sequence_indices(self, episodes: Sequence[int]) -> list[int]:
        """Return the indices of all branches of `episodes`, in order."""
        first, last = self.first.tolist(), self.last.tolist()
        return [index for episode in episodes for index in range(first[episode], last[episode] + 1)]


def assign_episode_ids(group: torch.Tensor, episode: torch.Tensor, **shared: torch.Tensor) -> torch.Tensor:
    """Return [N] episode ids, unique over all groups: the index of the episode's first branch.

    group, episode: [N] as in `Rollout`; a negative episode is a rollout without branches. shared: [N] values that all
    branches of an episode must share. Raises ValueError if branches are not adjacent or differ in such a value.
    """
    is_branch, pairs = episode >= 0, torch.stack([group, episode], dim=1)
    if not bool(is_branch.any()):
        return torch.arange(len(group))
    starts_episode = torch.ones_like(is_branch)
    starts_episode[1:] = ~is_branch[1:] | (pairs[1:] != pairs[:-1]).any(dim=1)
    if len((first_pairs := pairs[is_branch & starts_episode]).unique(dim=0)) < len(first_pairs):
        raise ValueError("branches of an episode are not adjacent")
    episodes = Episodes(starts_episode.cumsum(0) - 1)
    for name, column in shared.items():
        if not torch.equal(episodes.expand(episodes.take_last(column)), column):
            raise ValueError(f"branches of an episode differ in {name}")
    return episodes.expand(episodes.first)
