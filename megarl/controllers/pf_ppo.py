"""PF-PPO (arXiv:2409.06957): PPO on the samples whose reward is reliable. A reward model is most reliable on the best
and the worst answers to a prompt, and least on those between, most of which are filtered out.

The remaining samples go into a replay buffer, which fills a step's batch up to its usual size. For samples of an
earlier policy the importance ratio uses the engine's log-probs of that time (`drawn_by`). Each rank buffers the
rollouts that it generated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megarl.checkpoint.manifest import Entry, Write, hash_file, sync, write_nothing
from megarl.config import Config, ConfigError
from megarl.config.strict import PositiveInt, Share
from megarl.controllers.policy_update import Experience
from megarl.controllers.ppo import PPOController, PPOOptions
from megarl.observe.rollout_log import part_file, read_records, step_folder, write_part
from megarl.types import Comm, Prompt, Rollouts

if TYPE_CHECKING:
    from megarl.flow import HybridFlow

FOLDER = "buffer"
"""In a checkpoint: files as those of recorded rollouts, one of each rank that has some."""


class ReplayBuffer:
    """The newest `most` rollouts, an episode being one. All ranks do the same with it. Records of routing are not kept:
    they are heavy, and weights have moved on."""

    def __init__(self, most: int) -> None:
        self.capacity = most
        self._rollouts: Rollouts | None = None

    def __len__(self) -> int:
        return 0 if self._rollouts is None else len(self._rollouts.episodes)

    def add(self, rollouts: Rollouts) -> None:
        """Collective. The oldest go where there are too many."""
        if not len(rollouts):
            return
        light = rollouts.replace_local([dataclasses.replace(rollout, routing=None) for rollout in rollouts.local])
        kept = light if self._rollouts is None else Rollouts.concat([self._rollouts, light])
        episodes = kept.episodes
        newest = torch.arange(len(episodes)) >= len(episodes) - self.capacity
        self._rollouts = kept.select(episodes.expand(newest))

    def sample(self, count: int, draw: torch.Generator) -> Rollouts | None:
        """So many different ones, or all where there are fewer; None where there are none. They stay in it."""
        if self._rollouts is None or count < 1:
            return None
        episodes = self._rollouts.episodes
        chosen = torch.zeros(len(episodes), dtype=torch.bool)
        chosen[torch.randperm(len(episodes), generator=draw)[:count]] = True
        return self._rollouts.select(episodes.expand(chosen))

    def save(self) -> Write:
        if self._rollouts is None or not self._rollouts.local:
            return write_nothing
        kept = self._rollouts  # which nobody changes: another takes its place

        def write(folder: Path) -> dict[Path, Entry]:
            file = part_file(folder / FOLDER, 0, kept.comm.rank)
            numbers = kept.episode[
                kept.local_indices
            ].tolist()  # other ones in each step, which those of the generations are not
            here = [
                one if one.episode < 0 else dataclasses.replace(one, episode=number)
                for one, number in zip(kept.local, numbers, strict=True)
            ]
            write_part(file, 0, len(kept), kept.local_indices.tolist(), here)
            sync(file)
            return {file: hash_file(file)}

        return write

    def restore(self, folder: Path, everyone: Comm) -> None:
        """Collective. Raises ConfigError on all ranks where a file is not of this program."""
        if not step_folder(folder / FOLDER, 0).is_dir():
            return
        world, records, error = len(everyone.all_gather_objects(None)), [], ""
        try:
            records = read_records(folder / FOLDER, 0, everyone.rank, world)
        except ConfigError as failure:
            error = str(failure)
        if errors := [text for text in everyone.all_gather_objects(error) if text]:
            raise ConfigError(errors[0])
        self._rollouts = Rollouts.gather([one.rollout for one in records], [one.number for one in records], everyone)


@dataclass(frozen=True)
class PFPPOOptions(PPOOptions):
    filter: Share = 0.8
    """Probability with which a sample that is neither among the best nor the worst of its prompt is left out."""
    buffer: PositiveInt = 10_000
    """Rollouts that are kept at most, the newest; an episode is one."""


class PFPPOController(PPOController):
    Options = PFPPOOptions
    is_group_relative = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.buffer = ReplayBuffer(self.options.buffer)

    @classmethod
    def read_options(cls, config: Config) -> Any:
        if config.rollout.has_truncated_sampling:
            raise ConfigError(
                f"algorithm={config.algorithm} with sampling that is cut off (rollout.top_p, top_k, min_p): its buffer "
                "does not keep what could have been sampled, which older log-probs are of; sample from all words"
            )
        return super().read_options(config)

    def collect_experience(self, flow: HybridFlow, items: Sequence[Prompt]) -> Experience:
        """Filter the step's rollouts, and fill up with older ones from the buffer."""
        experience = super().collect_experience(flow, items)
        rollouts = experience.trained_rollouts
        draw = torch.Generator().manual_seed(self.config.run.seed * 1_000_003 + self.steps)
        fresh = rollouts.select(reliable_mask(rollouts, self.options.filter, draw))
        count, remaining = len(rollouts.episodes), len(fresh.episodes)
        older = self.buffer.sample(count - remaining, draw)
        self.buffer.add(fresh)
        metrics = {
            "rollout/filtered_frac": 1 - remaining / max(1, count),
            "rollout/buffer": float(len(self.buffer)),
        }
        trained = fresh if older is None else Rollouts.concat([older, fresh])
        return dataclasses.replace(experience, trained_rollouts=trained, metrics=experience.metrics | metrics)

    def save(self) -> Write:
        return self.buffer.save()

    def restore(self, folder: Path, everyone: Comm) -> None:
        self.buffer.restore(folder, everyone)


def reliable_mask(rollouts: Rollouts, share: float, draw: torch.Generator) -> torch.Tensor:
    """[N] bool: the best and the worst of each prompt, equal ones too, and of the others each with a probability of
    1 - share, an episode with all of its branches. The same on all ranks, which have the same figures and the same
    `draw`."""
    groups, row = torch.unique(rollouts.group, return_inverse=True)
    edges = rollouts.reward.new_zeros(len(groups))
    highest = edges.scatter_reduce(0, row, rollouts.reward, reduce="amax", include_self=False)[row]
    lowest = edges.scatter_reduce(0, row, rollouts.reward, reduce="amin", include_self=False)[row]
    episodes = rollouts.episodes
    lucky = torch.rand(len(episodes), generator=draw, dtype=torch.float64) >= share
    return episodes.expand(lucky) | (rollouts.reward == highest) | (rollouts.reward == lowest)
