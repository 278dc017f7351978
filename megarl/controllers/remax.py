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
    has_fixed_prompts = True
    needs_greedy = True

    def collect_experience(self, flow: Flow, items: Sequence[Prompt]) -> Experience:
        """Generate twice: the samples, and one greedy answer to each prompt, which is not trained on."""
        experience = super().collect_experience(flow, items)
        greedy = flow.reward.score(flow.rollout.generate(items, 1, greedy=True))
        # Both generations number groups in the order of the prompts; the sampled ones need not start at 0.
        prompt = experience.trained_rollouts.group - experience.rollouts.group.min()
        answered, reward = torch.zeros(len(items), dtype=torch.bool), torch.zeros(len(items), dtype=torch.float64)
        scored = greedy.select(~greedy.has_status("aborted") & (greedy.unscored == 0))
        answered[scored.group], reward[scored.group] = True, scored.reward
        has_baseline = answered[prompt]  # without a greedy answer there is no baseline
        metrics = {"rollout/reward_greedy": float(scored.merge_branches().reward.mean()) if len(scored) else 0.0}
        return replace(
            experience,
            trained_rollouts=experience.trained_rollouts.select(has_baseline),
            baseline=reward[prompt[has_baseline]],
            metrics=experience.metrics | metrics,
        )
