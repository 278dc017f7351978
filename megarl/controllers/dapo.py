"""DAPO (arXiv:2503.14476): GRPO that clips higher, means over tokens, and goes on sampling until its batch is full of
prompts from which something can be learned (section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch

from megarl.config import ConfigError, Range
from megarl.controllers.grpo import Experience, GRPOController
from megarl.controllers.policy import trained
from megarl.types import Prompt, Rollouts

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


@dataclass(frozen=True)
class DAPOOptions:
    generations: Annotated[int, Range(1, 1000)] = 10
    """Generations of a step at most. What is not full then is trained on as it is."""
    compared: str = ""
    """Part of the reward by which samples of a prompt are told apart, such as whether the answer is right; empty for
    the whole reward, in which a penalty for length makes all of them different."""


class DAPOController(GRPOController):
    Options = DAPOOptions
    asks_further = True

    def experience(self, flow: HybridFlow, items: Sequence[Prompt]) -> Experience:
        """Of the prompts in the order in which they come, the first so many of whose samples some are better than
        others; where there are none at all, all samples of the step."""
        wanted, offered = len(items), 0
        parts: list[Rollouts] = []
        kept: list[Rollouts] = []
        lacking = wanted
        while lacking and len(parts) < self.options.generations:
            # As many as are likely to be needed: from the second time on by the share that was of use so far.
            useful = (wanted - lacking) / offered if lacking < wanted else 1.0
            prompts = items if not parts else flow.loader.further(min(wanted, round(lacking / useful)))
            found = flow.rollout.generate(prompts, self.config.rollout.samples_per_prompt)
            parts.append(flow.reward.score(found))
            kept.append(self._telling(trained(parts[-1], self.config)))
            offered += len(prompts)
            lacking = max(0, lacking - groups(kept[-1]))
        rollouts, telling = Rollouts.joined(parts), Rollouts.joined(kept)
        metrics = {
            "rollout/generations": float(len(parts)),
            "rollout/groups_told_apart_frac": groups(telling) / offered,
            "rollout/groups_lacking": float(lacking),
        }
        first = telling.group.unique()[:wanted]
        chosen = telling.select(torch.isin(telling.group, first))
        return Experience(rollouts, chosen if len(chosen) else trained(rollouts, self.config), metrics=metrics)

    def _telling(self, rollouts: Rollouts) -> Rollouts:
        """Those of groups whose members differ."""
        part = self.options.compared
        if part and len(rollouts) and part not in rollouts.reward_parts:
            there = ", ".join(sorted(rollouts.reward_parts)) or "none"
            raise ConfigError(f"options.compared={part} is no part of the reward; its parts are {there}")
        figure = rollouts.reward_parts[part] if part and len(rollouts) else rollouts.reward
        _, row = torch.unique(rollouts.group, return_inverse=True)
        edges = figure.new_zeros(groups(rollouts))
        highest = edges.scatter_reduce(0, row, figure, reduce="amax", include_self=False)
        lowest = edges.scatter_reduce(0, row, figure, reduce="amin", include_self=False)
        return rollouts.select((highest > lowest)[row])


def groups(rollouts: Rollouts) -> int:
    return len(rollouts.group.unique())
