"""PF-PPO (arXiv:2409.06957): PPO on the samples whose reward is reliable. A reward model is most reliable on the best
and the worst answers to a prompt, and least on those in between; most of these are filtered out.

The remaining samples go into a replay buffer, which fills a step's batch up to its usual size. For samples of an
earlier policy the importance ratio uses the engine's log-probs of that time (`behavior_logprobs`). Each rank buffers
the rollouts that it generated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.checkpoint.manifest import Entry, Write, hash_file, sync, write_nothing
from megarl.config import Config, ConfigError
from megarl.config.strict import PositiveInt, Share
from megarl.controllers.controller import Flow
from megarl.controllers.policy_gradient import Experience
from megarl.controllers.ppo import PPOController, PPOOptions
from megarl.observe.rollout_log import part_file, read_records, step_folder, write_part
from megarl.types import Comm, Prompt, Rollouts

FOLDER = "buffer"
"""Folder in a checkpoint, in the format of recorded rollouts: one file per rank that has rollouts."""


class ReplayBuffer:
    """The newest `capacity` episodes, without routing, which is large and belongs to older weights. Collective."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rollouts: Rollouts | None = None

    def __len__(self) -> int:
        return 0 if self._rollouts is None else len(self._rollouts.episodes)

    def add(self, rollouts: Rollouts) -> None:
        """Add rollouts; drop the oldest episodes beyond the capacity. Collective."""
        if not len(rollouts):
            return
        without_routing = rollouts.replace_local(
            [dataclasses.replace(rollout, routing=None, sparse_indices=None) for rollout in rollouts.local]
        )
        merged = without_routing if self._rollouts is None else Rollouts.concat([self._rollouts, without_routing])
        episodes = merged.episodes
        newest = torch.arange(len(episodes)) >= len(episodes) - self.capacity
        self._rollouts = merged.select(episodes.expand(newest))

    def sample(self, count: int, generator: torch.Generator) -> Rollouts | None:
        """Return `count` distinct episodes, or all if there are fewer; None if the buffer is empty. They stay in the
        buffer."""
        if self._rollouts is None or count < 1:
            return None
        episodes = self._rollouts.episodes
        chosen = torch.zeros(len(episodes), dtype=torch.bool)
        chosen[torch.randperm(len(episodes), generator=generator)[:count]] = True
        return self._rollouts.select(episodes.expand(chosen))

    def save(self) -> Write:
        if self._rollouts is None or not self._rollouts.local:
            return write_nothing
        snapshot = self._rollouts  # never modified in place

        def write(folder: Path) -> dict[Path, Entry]:
            file = part_file(folder / FOLDER, 0, snapshot.comm.rank)
            # The buffer's episode numbers are distinct; those of the generations repeat.
            numbers = snapshot.episode[snapshot.local_indices].tolist()
            rollouts = [
                rollout if rollout.episode < 0 else dataclasses.replace(rollout, episode=number)
                for rollout, number in zip(snapshot.local, numbers, strict=True)
            ]
            write_part(file, 0, len(snapshot), snapshot.local_indices.tolist(), rollouts)
            sync(file)
            return {file: hash_file(file)}

        return write

    def restore(self, folder: Path, comm: Comm) -> None:
        """Load the buffer from a checkpoint. Collective. Raises ConfigError on all ranks if a file is not in this
        format."""
        if not step_folder(folder / FOLDER, 0).is_dir():
            return
        world, records, error = len(comm.all_gather_objects(None)), [], ""
        try:
            # With sampling masks and images; there is no routing.
            records = read_records(folder / FOLDER, 0, comm.rank, world, include_trainer_columns=True)
        except ConfigError as failure:
            error = str(failure)
        if errors := [text for text in comm.all_gather_objects(error) if text]:
            raise ConfigError(errors[0])
        self._rollouts = Rollouts.gather(
            [record.rollout for record in records], [record.number for record in records], comm
        )


@dataclass(frozen=True)
class PFPPOOptions(PPOOptions):
    drop_prob: Share = 0.8
    """Probability of dropping a sample that is neither among the best nor the worst of its prompt."""
    buffer_size: PositiveInt = 10_000
    """Maximum number of episodes in the buffer; the newest stay."""
    synonyms = {"filter": "drop_prob"}


class PFPPOController(PPOController):
    Options = PFPPOOptions
    is_group_relative = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.buffer = ReplayBuffer(self.options.buffer_size)

    def collect_experience(self, flow: Flow, items: Sequence[Prompt]) -> Experience:
        """Filter the step's rollouts, and fill up with older ones from the buffer."""
        experience = super().collect_experience(flow, items)
        rollouts = experience.trained_rollouts
        draw = torch.Generator().manual_seed(self.config.run.seed * 1_000_003 + self.steps)
        fresh = rollouts.select(reliable_mask(rollouts, self.options.drop_prob, draw))
        count, remaining = len(rollouts.episodes), len(fresh.episodes)
        older = self.buffer.sample(count - remaining, draw)
        self.buffer.add(fresh)
        metrics = {
            "rollout/filtered_frac": 1 - remaining / max(1, count),
            "rollout/buffer_size": float(len(self.buffer)),
        }
        trained = fresh if older is None else Rollouts.concat([older, fresh])
        return dataclasses.replace(experience, trained_rollouts=trained, metrics=experience.metrics | metrics)

    def save(self) -> Write:
        return self.buffer.save()

    def restore(self, folder: Path, comm: Comm) -> None:
        self.buffer.restore(folder, comm)


def reliable_mask(rollouts: Rollouts, drop_prob: float, generator: torch.Generator) -> torch.Tensor:
    """Return [N] bool: the best and the worst samples of each prompt, including ties, and each other episode with
    probability 1 - `drop_prob`, with all of its branches. All ranks get the same result from the same rewards and the
    same `generator`."""
    groups, row = torch.unique(rollouts.group, return_inverse=True)
    zeros = rollouts.reward.new_zeros(len(groups))
    highest = zeros.scatter_reduce(0, row, rollouts.reward, reduce="amax", include_self=False)[row]
    lowest = zeros.scatter_reduce(0, row, rollouts.reward, reduce="amin", include_self=False)[row]
    episodes = rollouts.episodes
    is_drawn = torch.rand(len(episodes), generator=generator, dtype=torch.float64) >= drop_prob
    return episodes.expand(is_drawn) | (rollouts.reward == highest) | (rollouts.reward == lowest)
