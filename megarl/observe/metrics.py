"""Figures of a batch of rollouts, under the names that RL users know."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megarl.types import Rollout


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over the rollouts, `rollout/...`; empty for no rollouts.

    Lengths are in tokens, and `response_length` counts the policy's own: not the prompt, not what tools answered.
    `tool_errors` is a total. `zero_spread_frac` is the share of prompts whose samples all have the same reward, from
    which group-relative methods learn nothing; there is none where every prompt was sampled once. `draft_accepted` is
    the share of drafted tokens that the policy accepted, where there were drafts.

    `aborted_frac` is the share of aborted ones, which nothing else here contains: it stands alone where all are.
    """
    if not rollouts:
        return {}
    whole = [rollout for rollout in rollouts if rollout.status != "aborted"]
    aborted = {"rollout/aborted_frac": 1 - len(whole) / len(rollouts)}
    return aborted | (_of_whole(whole) if whole else {})


def _of_whole(rollouts: Sequence[Rollout]) -> dict[str, float]:
    count = len(rollouts)
    rewards = [rollout.reward for rollout in rollouts]
    lengths = [rollout.num_actions for rollout in rollouts]
    metrics = {
        "rollout/reward_mean": statistics.fmean(rewards),
        "rollout/reward_std": statistics.pstdev(rewards),
        "rollout/reward_min": min(rewards),
        "rollout/reward_max": max(rewards),
        "rollout/response_length_mean": statistics.fmean(lengths),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/prompt_length_mean": statistics.fmean(len(rollout.turns[0].token_ids) for rollout in rollouts),
        "rollout/length_max": float(max(rollout.num_tokens for rollout in rollouts)),
        "rollout/turns_mean": statistics.fmean(sum(turn.is_action for turn in rollout.turns) for rollout in rollouts),
        "rollout/tool_calls_mean": statistics.fmean(rollout.tool_calls for rollout in rollouts),
        "rollout/tool_errors": float(sum(rollout.tool_errors for rollout in rollouts)),
        "rollout/no_tool_frac": sum(rollout.tool_calls == 0 for rollout in rollouts) / count,
        "rollout/truncated_frac": sum(rollout.status == "length" for rollout in rollouts) / count,
        "rollout/max_turns_frac": sum(rollout.status == "max_turns" for rollout in rollouts) / count,
    }
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout.reward)
    if len(groups) < count:
        metrics["rollout/zero_spread_frac"] = sum(min(group) == max(group) for group in groups.values()) / len(groups)
    if drafted := sum(rollout.drafted for rollout in rollouts):
        metrics["rollout/draft_accepted"] = sum(rollout.accepted for rollout in rollouts) / drafted
    parts = sorted({name for rollout in rollouts for name in rollout.reward_parts})
    if len(parts) > 1:  # a single part is the reward itself
        for name in parts:
            metrics[f"reward/{name}"] = statistics.fmean(rollout.reward_parts.get(name, 0.0) for rollout in rollouts)
    return metrics
