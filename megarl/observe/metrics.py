"""Figures of a batch of rollouts, under the names that RL users know."""

from __future__ import annotations

import statistics
from collections import Counter

import torch

from megarl.types import Rollouts


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Means over the rollouts, `rollout/...`; empty for no rollouts.

    Lengths are in tokens, and `response_length` counts the policy's own: not the prompt, not what tools answered.
    `tool_errors` is a total. `zero_spread_frac` is the share of prompts whose samples all have the same reward, from
    which group-relative methods learn nothing; there is none where every prompt was sampled once. `draft_accepted` is
    the share of drafted tokens that the policy accepted, where there were drafts.

    `aborted_frac` is the share of aborted ones, which nothing else here contains: it stands alone where all are.
    `reward_failed_frac` is the share of the others that have no reward, because a part of it failed, and
    `reward/NAME_failed_frac` says of which part that failed how often; what is said of rewards is of the rest.
    """
    if not len(rollouts):
        return {}
    whole = rollouts.select(~rollouts.are("aborted"))
    metrics = {"rollout/aborted_frac": 1 - len(whole) / len(rollouts)}
    if not len(whole):
        return metrics
    scored = whole.select(whole.unscored == 0)
    metrics["rollout/reward_failed_frac"] = 1 - len(scored) / len(whole)
    for name, count in Counter(part for part, _, _ in rollouts.unscored_for).items():
        metrics[f"reward/{name}_failed_frac"] = count / len(whole)
    return metrics | (_of_rewards(scored) if len(scored) else {}) | _of_whole(whole)


def _of_rewards(rollouts: Rollouts) -> dict[str, float]:
    rewards = rollouts.reward.tolist()
    metrics = {
        "rollout/reward_mean": statistics.fmean(rewards),
        "rollout/reward_std": statistics.pstdev(rewards),
        "rollout/reward_min": min(rewards),
        "rollout/reward_max": max(rewards),
    }
    _, row = torch.unique(rollouts.group, return_inverse=True)
    if (groups := int(row.max()) + 1) < len(rollouts):
        ends = rollouts.reward.new_zeros(2, groups)
        lowest, highest = (
            ends[i].scatter_reduce(0, row, rollouts.reward, reduce=way, include_self=False)
            for i, way in enumerate(("amin", "amax"))
        )
        metrics["rollout/zero_spread_frac"] = _mean(lowest == highest)
    parts = rollouts.reward_parts
    if len(parts) > 1 or any(not torch.equal(part, rollouts.reward) for part in parts.values()):
        for name, part in parts.items():  # a single one is the reward itself, unless it is weighed
            metrics[f"reward/{name}"] = statistics.fmean(part.tolist())
    return metrics


def _of_whole(rollouts: Rollouts) -> dict[str, float]:
    metrics = {
        "rollout/response_length_mean": _mean(rollouts.actions),
        "rollout/response_length_max": float(rollouts.actions.max()),
        "rollout/prompt_length_mean": _mean(rollouts.prompt_length),
        "rollout/length_max": float(rollouts.length.max()),
        "rollout/turns_mean": _mean(rollouts.turns),
        "rollout/tool_calls_mean": _mean(rollouts.tool_calls),
        "rollout/tool_errors": float(rollouts.tool_errors.sum()),
        "rollout/no_tool_frac": _mean(rollouts.tool_calls == 0),
        "rollout/truncated_frac": _mean(rollouts.are("length")),
        "rollout/max_turns_frac": _mean(rollouts.are("max_turns")),
    }
    if drafted := int(rollouts.drafted.sum()):
        metrics["rollout/draft_accepted"] = int(rollouts.accepted.sum()) / drafted
    return metrics


def _mean(numbers: torch.Tensor) -> float:
    """Of whole numbers, or of what is true or not."""
    return int(numbers.sum()) / len(numbers)
