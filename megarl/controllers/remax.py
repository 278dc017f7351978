"""ReMax (arXiv:2310.10505): the baseline of a sample is the reward of the greedy answer to its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megarl.controllers.grpo import GRPOController
from megarl.controllers.policy_update import Experience
from megarl.types import Prompt

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


class ReMaxController(GRPOController):
    is_group_relative = False  # one of a prompt will do
    has_fixed_prompts = True

    def collect_experience(self, flow: HybridFlow, items: Sequence[Prompt]) -> Experience:
        """Two generations: the samples, and one greedy answer to each prompt, which nothing is trained on."""
        found = super().collect_experience(flow, items)
        greedy = flow.reward.score(flow.rollout.generate(items, 1, greedy=True))
        # Sampled groups are numbered in the order of the prompts, from the first of the generation on; greedy ones too.
        prompt = found.trained_rollouts.group - found.rollouts.group.min()
        answered, reward = torch.zeros(len(items), dtype=torch.bool), torch.zeros(len(items), dtype=torch.float64)
        ended = greedy.select(~greedy.has_status("aborted") & (greedy.unscored == 0))
        answered[ended.group], reward[ended.group] = True, ended.reward
        there = answered[prompt]  # without a greedy answer there is nothing to compare with
        metrics = {"rollout/reward_greedy": float(ended.merge_branches().reward.mean()) if len(ended) else 0.0}
        return replace(
            found,
            trained_rollouts=found.trained_rollouts.select(there),
            baseline=reward[prompt[there]],
            metrics=found.metrics | metrics,
        )
