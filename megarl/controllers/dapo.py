"""DAPO (arXiv:2503.14476): GRPO with clip-higher and a token mean, which samples until its batch is full of prompts
whose samples differ in reward (section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from megarl.algorithms.advantages import overlong_penalty
from megarl.config import Config, ConfigError, Range
from megarl.config.strict import NonNegativeFloat, NonNegativeInt
from megarl.controllers.controller import Flow
from megarl.controllers.grpo import GRPOController
from megarl.controllers.mini_batches import max_response_length
from megarl.controllers.policy_gradient import Experience, select_trainable
from megarl.types import Prompt, Rollouts


@dataclass(frozen=True)
class DAPOOptions:
    max_num_gen_batches: Annotated[int, Range(1, 1000)] = 10
    """Maximum number of generation batches of a step. A batch that is not full by then is trained on as it is."""
    overlong_buffer_len: NonNegativeInt | None = None
    """Tokens at the end of the response budget over which a length penalty grows (section 3.4, eq. 13); 0 disables it.
    Null: a fifth of the budget, as in the paper (4,096 of 20,480). Groups are filtered before the penalty is added."""
    overlong_penalty_factor: NonNegativeFloat = 1.0
    """The largest length penalty, for responses that use the whole budget."""
    filter_metric: str = ""
    """Reward part that groups are filtered by, such as correctness; empty for the whole reward, in which a length
    penalty would make all samples differ."""
    synonyms = {
        "generations": "max_num_gen_batches",
        "compared": "filter_metric",
        "overlong": "overlong_buffer_len",
        "overlong_buffer": "overlong_buffer_len",
    }


class DAPOController(GRPOController):
    Options = DAPOOptions
    has_dynamic_sampling = True

    @classmethod
    def read_options(cls, config: Config) -> DAPOOptions:
        options: DAPOOptions = super().read_options(config)
        if (options.overlong_buffer_len or 0) > (budget := max_response_length(config)):
            raise ConfigError(
                f"options.overlong_buffer_len={options.overlong_buffer_len} exceeds the response budget of {budget} "
                f"tokens (rollout.max_new_tokens times rollout.max_turns, at most rollout.max_context)"
            )
        return options

    def collect_experience(self, flow: Flow, items: Sequence[Prompt]) -> Experience:
        """Sample until there are as many groups with differing rewards as prompts were asked for, and keep the first of
        these, in the order of the prompts. If no group differs, keep all samples of the step."""
        wanted, offered = len(items), 0
        parts: list[Rollouts] = []
        useful_parts: list[Rollouts] = []
        missing = wanted
        while missing and len(parts) < self.options.max_num_gen_batches:
            # Ask for as many as are likely to be needed: after the first pass, by the share that was useful so far.
            useful_frac = (wanted - missing) / offered if missing < wanted else 1.0
            prompts = items if not parts else flow.loader.next_items(min(wanted, round(missing / useful_frac)))
            sampled = flow.rollout.generate(prompts, self.config.rollout.samples_per_prompt)
            scored = flow.reward.score(sampled)
            useful_groups = self._select_informative(select_trainable(scored, self.config)).group.unique()
            parts.append(self._penalize_overlong(scored))
            useful_parts.append(select_trainable(parts[-1], self.config))
            useful_parts[-1] = useful_parts[-1].select(torch.isin(useful_parts[-1].group, useful_groups))
            offered += len(prompts)
            missing = max(0, missing - count_groups(useful_parts[-1]))
        rollouts, useful_rollouts = Rollouts.concat(parts), Rollouts.concat(useful_parts)
        metrics = {
            "rollout/num_gen_batches": float(len(parts)),
            "rollout/informative_groups_frac": count_groups(useful_rollouts) / offered,
            "rollout/missing_groups": float(missing),
        }
        first_groups = useful_rollouts.group.unique()[:wanted]
        chosen = useful_rollouts.select(torch.isin(useful_rollouts.group, first_groups))
        return Experience(rollouts, chosen if len(chosen) else select_trainable(rollouts, self.config), metrics=metrics)

    def _penalize_overlong(self, rollouts: Rollouts) -> Rollouts:
        """Add the length penalty to the rewards, as the part `overlong`."""
        max_length = max_response_length(self.config)
        buffer_len = self.options.overlong_buffer_len
        if buffer_len is None:
            buffer_len = max_length // 5
        if not buffer_len or not self.options.overlong_penalty_factor:
            return rollouts
        episodes = rollouts.episodes
        per_episode = overlong_penalty(episodes.sum_branches(rollouts.actions), max_length, buffer_len)
        per_episode *= self.options.overlong_penalty_factor
        penalties = episodes.expand(per_episode)[rollouts.local_indices].tolist()
        return rollouts.replace_local(
            [
                rollout
                if rollout.status == "aborted" or rollout.unscored  # has no reward
                else replace(
                    rollout, reward=rollout.reward + penalty, reward_parts={**rollout.reward_parts, "overlong": penalty}
                )
                for rollout, penalty in zip(rollouts.local, penalties, strict=True)
            ]
        )

    def _select_informative(self, rollouts: Rollouts) -> Rollouts:
        """Select the groups whose members differ in reward."""
        part = self.options.filter_metric
        if part and len(rollouts) and part not in rollouts.reward_parts:
            parts = ", ".join(sorted(rollouts.reward_parts)) or "none"
            raise ConfigError(f"options.filter_metric={part} is not a part of the reward; its parts are {parts}")
        values = rollouts.reward_parts[part] if part and len(rollouts) else rollouts.reward
        _, row = torch.unique(rollouts.group, return_inverse=True)
        zeros = values.new_zeros(count_groups(rollouts))
        highest = zeros.scatter_reduce(0, row, values, reduce="amax", include_self=False)
        lowest = zeros.scatter_reduce(0, row, values, reduce="amin", include_self=False)
        return rollouts.select((highest > lowest)[row])


def count_groups(rollouts: Rollouts) -> int:
    return len(rollouts.group.unique())
