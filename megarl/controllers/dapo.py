"""DAPO (arXiv:2503.14476): GRPO that clips higher, means over tokens, and goes on sampling until its batch is full of
prompts from which something can be learned (section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import torch

from megarl.algorithms.token_rewards import overlong_penalty
from megarl.config import ConfigError, Range
from megarl.config.strict import Share
from megarl.controllers.choose_loss import max_response_length
from megarl.controllers.grpo import GRPOController
from megarl.controllers.policy_gradient import select_trainable
from megarl.controllers.policy_update import Experience
from megarl.types import Prompt, Rollouts

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


@dataclass(frozen=True)
class DAPOOptions:
    generations: Annotated[int, Range(1, 1000)] = 10
    """Generations of a step at most. What is not full then is trained on as it is."""
    overlong: Share = 0.2
    """Of the tokens that an answer may have, the share at the end in which a penalty grows to 1 (section 3.4, eq. 13;
    the paper has 4,096 of 20,480). It comes after samples are told apart. 0 is none."""
    compared: str = ""
    """Part of the reward by which samples of a prompt are told apart, such as whether the answer is right; empty for
    the whole reward, in which a penalty for length makes all of them different."""


class DAPOController(GRPOController):
    Options = DAPOOptions
    has_dynamic_sampling = True

    def collect_experience(self, flow: HybridFlow, items: Sequence[Prompt]) -> Experience:
        """Of the prompts in the order in which they come, the first so many of whose samples some are better than
        others; where there are none at all, all samples of the step."""
        wanted, offered = len(items), 0
        parts: list[Rollouts] = []
        kept: list[Rollouts] = []
        lacking = wanted
        while lacking and len(parts) < self.options.generations:
            # As many as are likely to be needed: from the second time on by the share that was of use so far.
            useful = (wanted - lacking) / offered if lacking < wanted else 1.0
            prompts = items if not parts else flow.loader.next_items(min(wanted, round(lacking / useful)))
            found = flow.rollout.generate(prompts, self.config.rollout.samples_per_prompt)
            scored = flow.reward.score(found)
            telling = self._select_informative(select_trainable(scored, self.config)).group.unique()
            parts.append(self._penalize_overlong(scored))
            kept.append(select_trainable(parts[-1], self.config))
            kept[-1] = kept[-1].select(torch.isin(kept[-1].group, telling))
            offered += len(prompts)
            lacking = max(0, lacking - count_groups(kept[-1]))
        rollouts, useful_ones = Rollouts.concat(parts), Rollouts.concat(kept)
        metrics = {
            "rollout/generations": float(len(parts)),
            "rollout/groups_told_apart_frac": count_groups(useful_ones) / offered,
            "rollout/groups_lacking": float(lacking),
        }
        first = useful_ones.group.unique()[:wanted]
        chosen = useful_ones.select(torch.isin(useful_ones.group, first))
        return Experience(rollouts, chosen if len(chosen) else select_trainable(rollouts, self.config), metrics=metrics)

    def _penalize_overlong(self, rollouts: Rollouts) -> Rollouts:
        """With the penalty of what is too long as a part of the reward."""
        most = max_response_length(self.config)
        if not (buffer := round(self.options.overlong * most)):
            return rollouts
        episodes = rollouts.episodes
        found = overlong_penalty(episodes.sum_branches(rollouts.actions), most, buffer)
        penalties = episodes.expand(found)[rollouts.local_indices].tolist()
        return rollouts.replace_local(
            [
                one
                if one.status == "aborted" or one.unscored  # which have no reward
                else replace(one, reward=one.reward + penalty, reward_parts={**one.reward_parts, "overlong": penalty})
                for one, penalty in zip(rollouts.local, penalties, strict=True)
            ]
        )

    def _select_informative(self, rollouts: Rollouts) -> Rollouts:
        """Those of groups whose members differ."""
        part = self.options.compared
        if part and len(rollouts) and part not in rollouts.reward_parts:
            there = ", ".join(sorted(rollouts.reward_parts)) or "none"
            raise ConfigError(f"options.compared={part} is no part of the reward; its parts are {there}")
        figure = rollouts.reward_parts[part] if part and len(rollouts) else rollouts.reward
        _, row = torch.unique(rollouts.group, return_inverse=True)
        edges = figure.new_zeros(count_groups(rollouts))
        highest = edges.scatter_reduce(0, row, figure, reduce="amax", include_self=False)
        lowest = edges.scatter_reduce(0, row, figure, reduce="amin", include_self=False)
        return rollouts.select((highest > lowest)[row])


def count_groups(rollouts: Rollouts) -> int:
    return len(rollouts.group.unique())
