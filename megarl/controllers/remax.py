"""ReMax (arXiv:2310.10505): the baseline of a sample is the reward of the greedy answer to its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megarl.controllers.controller import Flow
from megarl.controllers.grpo import GRPOController
from megarl.controllers.policy_gradient import Experience
from megarl.types import Prompt


class ReMaxController(GRPOController):
    is_group_relative = False  # one sample per prompt is enough
    needs_greedy = True

    def collect_experience(self, flow: Flow, items: Sequence[Prompt]) -> Experience:
        """Generate twice: the samples, and one greedy answer to each prompt, which is not trained on."""
        experience = super().collect_experience(flow, items)
        greedy = flow.reward.score(flow.rollout.generate_again(experience.rollouts, greedy=True))
        num_groups = int(experience.rollouts.group.max()) + 1
        answered, reward = torch.zeros(num_groups, dtype=torch.bool), torch.zeros(num_groups, dtype=torch.float64)
        scored = greedy.select(~greedy.has_status("aborted") & (greedy.unscored == 0))
        answered[scored.group], reward[scored.group] = True, scored.reward
        group = experience.trained_rollouts.group
        has_baseline = answered[group]  # without a greedy answer there is no baseline
        metrics = {"rollout/reward_greedy": float(scored.merge_branches().reward.mean()) if len(scored) else 0.0}
        return replace(
            experience,
            trained_rollouts=experience.trained_rollouts.select(has_baseline),
            baseline=reward[group[has_baseline]],
            metrics=experience.metrics | metrics,
        )
