"""PF-PPO (arXiv:2409.06957): PPO on samples whose reward can be relied on. A reward model is right about the best and
the worst answers to a prompt, and least so about those between, which are mostly filtered out.

What is left goes into a buffer, out of which a step's batch is filled up to the size that it would have had. For
samples of an earlier policy the ratio is to the engine's own log-probs of then, as `drawn_by` has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint.manifest import Write
from megarl.config import Config, ConfigError
from megarl.controllers.buffer import Buffer
from megarl.controllers.ppo import PPOController, PPOOptions
from megarl.strict import Count, Share
from megarl.types import Everyone, Rollouts


@dataclass(frozen=True)
class PFPPOOptions(PPOOptions):
    filter: Share = 0.8
    """Probability with which a sample that is neither among the best nor the worst of its prompt is left out."""
    buffer: Count = 10_000
    """Rollouts that are kept at most, the newest; an episode is one."""


class PFPPOController(PPOController):
    Options = PFPPOOptions
    compares_samples = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.buffer = Buffer(self.options.buffer)

    @classmethod
    def read_options(cls, config: Config) -> Any:
        if config.rollout.cut_off:
            raise ConfigError(
                f"algorithm={config.algorithm} with sampling that is cut off (rollout.top_p, top_k, min_p): its buffer "
                "does not keep what could have been sampled, which older log-probs are of; sample from all words"
            )
        return super().read_options(config)

    def chosen(self, rollouts: Rollouts) -> tuple[Rollouts, dict[str, float]]:
        draw = torch.Generator().manual_seed(self.config.run.seed * 1_000_003 + self.steps)
        fresh = rollouts.select(reliable(rollouts, self.options.filter, draw))
        count, left = len(rollouts.episodes), len(fresh.episodes)
        older = self.buffer.drawn(count - left, draw)
        self.buffer.add(fresh)
        metrics = {
            "rollout/filtered_frac": 1 - left / max(1, count),
            "rollout/buffer": float(len(self.buffer)),
        }
        if older is None:
            return fresh, metrics
        return Rollouts.joined([older, fresh]), metrics

    def save(self) -> Write:
        return self.buffer.save()

    def restore(self, folder: Path, everyone: Everyone) -> None:
        self.buffer.restore(folder, everyone)


def reliable(rollouts: Rollouts, share: float, draw: torch.Generator) -> torch.Tensor:
    """[N] bool: the best and the worst of each prompt, equal ones too, and of the others each with a probability of
    1 - share, an episode with all of its branches. The same on all ranks, which have the same figures and the same
    `draw`."""
    groups, row = torch.unique(rollouts.group, return_inverse=True)
    edges = rollouts.reward.new_zeros(len(groups))
    highest = edges.scatter_reduce(0, row, rollouts.reward, reduce="amax", include_self=False)[row]
    lowest = edges.scatter_reduce(0, row, rollouts.reward, reduce="amin", include_self=False)[row]
    episodes = rollouts.episodes
    lucky = torch.rand(len(episodes), generator=draw, dtype=torch.float64) >= share
    return episodes.each(lucky) | (rollouts.reward == highest) | (rollouts.reward == lowest)
