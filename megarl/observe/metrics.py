"""Figures of a batch of rollouts, under the names that RL users know."""

from __future__ import annotations

import statistics

import torch

from megarl.algorithms.totals import picked
from megarl.types import Rollouts, TrainBatch


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Means over the rollouts, `rollout/...`; empty for no rollouts.

    Lengths are in tokens, and `response_length` counts the policy's own: not the prompt, not what tools answered.
    `tool_errors` is a total. `zero_spread_frac` is the share of prompts whose samples all have the same reward, from
    which group-relative methods learn nothing; there is none where every prompt was sampled once. `draft_accepted` is
    the share of drafted tokens that the policy accepted, where there were drafts.

    `aborted_frac` is the share of aborted ones, which nothing else here contains: it stands alone where all are.
    """
    if not len(rollouts):
        return {}
    whole = rollouts.select(~rollouts.are("aborted"))
    aborted = {"rollout/aborted_frac": 1 - len(whole) / len(rollouts)}
    return aborted | (_of_whole(whole) if len(whole) else {})


def batch_metrics(batch: TrainBatch, seconds: float, world: int) -> dict[str, float]:
    """Of what a step of so many seconds trained on, on so many ranks: tokens per second on each; the mean of the
    advantages and their (population) variance over all action tokens, where there are advantages."""
    found = {"perf/tokens_per_second_per_rank": int(batch.lengths.sum()) / seconds / world}
    if batch.advantages is None:
        return found
    own = picked(batch.advantages, batch.loss_mask, torch.float64)
    count, whole = batch.total(torch.stack([own.new_tensor(len(own)), own.sum()])).tolist()
    if not count:
        return found
    mean = whole / count
    variance = float(batch.total((own - mean).square().sum())) / count
    return found | {"actor/advantage_mean": mean, "actor/advantage_variance": variance}


def _of_whole(rollouts: Rollouts) -> dict[str, float]:
    count = len(rollouts)
    rewards = rollouts.reward.tolist()
    metrics = {
        "rollout/reward_mean": statistics.fmean(rewards),
        "rollout/reward_std": statistics.pstdev(rewards),
        "rollout/reward_variance": statistics.pvariance(rewards),
        "rollout/reward_min": min(rewards),
        "rollout/reward_max": max(rewards),
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
    _, row = torch.unique(rollouts.group, return_inverse=True)
    if (groups := int(row.max()) + 1) < count:
        ends = rollouts.reward.new_zeros(2, groups)
        lowest, highest = (
            ends[i].scatter_reduce(0, row, rollouts.reward, reduce=way, include_self=False)
            for i, way in enumerate(("amin", "amax"))
        )
        metrics["rollout/zero_spread_frac"] = _mean(lowest == highest)
    if drafted := int(rollouts.drafted.sum()):
        metrics["rollout/draft_accepted"] = int(rollouts.accepted.sum()) / drafted
    if len(rollouts.reward_parts) > 1:  # a single part is the reward itself
        for name, part in rollouts.reward_parts.items():
            metrics[f"reward/{name}"] = statistics.fmean(part.tolist())
    return metrics


def _mean(numbers: torch.Tensor) -> float:
    """Of whole numbers, or of what is true or not."""
    return int(numbers.sum()) / len(numbers)
