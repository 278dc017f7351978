"""Metrics of a batch of rollouts, under the names that RL users know.

`ZeroSpreadWarning` warns when for several steps all answers to each prompt had the same reward, so that nothing is learned. It
applies to algorithms that learn only from differences between the samples of a prompt; a critic distinguishes actions
even if rewards are equal. It is no guard: it costs nothing, changes nothing and is always on.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping

import torch

from megarl.algorithms.token_stats import masked_select
from megarl.types import Rollouts, TrainBatch
from megarl.types.requirements import Requirements

ZERO_SPREAD = "rollout/zero_spread_frac"

WARN_AFTER_STEPS = 3
"""Steps of which it is said; one alone is chance where prompts are few."""


class ZeroSpreadWarning:
    """Of a run; all ranks see the same figures."""

    def __init__(self, declared: Requirements) -> None:
        self._is_enabled = declared.is_group_relative and "critic" not in declared.roles
        self._is_refilled = declared.has_dynamic_sampling
        self._zero_spread_steps = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> str:
        """A line for the log once there are `IN_A_ROW` such steps, and again where it comes again after a better one;
        else empty. A step without any reward says nothing."""
        if not self._is_enabled or ZERO_SPREAD not in metrics:
            return ""
        self._zero_spread_steps = self._zero_spread_steps + 1 if metrics[ZERO_SPREAD] == 1.0 else 0
        if self._zero_spread_steps != WARN_AFTER_STEPS:
            return ""
        mean = metrics["rollout/reward_mean"]
        other = "" if self._is_refilled else ", or set algorithm=dapo, which looks for prompts that differ"
        return (
            f"step {step}: for {WARN_AFTER_STEPS} steps all answers to each prompt have had the same reward ({ZERO_SPREAD} 1, mean "
            f"{mean:.3g}): they tell no answer from another, and nothing is learned from them. Read some answers "
            "(tools/view_rollouts.py): does the reward find what is right in them? If so, take easier prompts where "
            "all are wrong (or sft first), harder ones where all are right; or raise rollout.samples_per_prompt or "
            f"rollout.temperature{other}"
        )


MAX_SOURCES = 32
"""Sources of prompts of which each has figures of its own."""
DEFAULT_SOURCE = "other"
"""The source, in the names of figures, of what has none."""


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Means over the rollouts, `rollout/...`; empty for no rollouts. An episode in several branches is one of them: its
    tokens, turns and calls are added up, its reward counts once. `branches_mean` is said where there are such.

    Lengths are in tokens, and `response_length` counts the policy's own: not the prompt, not what tools answered.
    `tool_errors` is a total. `zero_spread_frac` is the share of prompts whose samples all have the same reward, from
    which group-relative methods learn nothing; there is none where every prompt was sampled once. `draft_accepted` is
    the share of drafted tokens that the policy accepted, where there were drafts. `support_mean` is among how many
    tokens the policy could choose, where sampling was cut off.

    Of prompts from 2 to `MAX_SOURCES` sources (`data_source`) there are also `rollout/reward_mean/<source>`,
    `response_length_mean/<source>` and `count/<source>`, the number of rollouts.

    `aborted_frac` is the share of aborted ones, which nothing else here contains: it stands alone where all are.
    `reward_failed_frac` is the share of the others that have no reward, because a part of it failed, and
    `reward/NAME_failed_frac` says of which part that failed how often; what is said of rewards is of the rest.
    """
    if not len(rollouts):
        return {}
    branches = int((~rollouts.has_status("aborted")).sum())
    rollouts = rollouts.merge_branches()
    whole = rollouts.select(~rollouts.has_status("aborted"))
    metrics = {"rollout/aborted_frac": 1 - len(whole) / len(rollouts)}
    if not len(whole):
        return metrics
    if branches > len(whole):
        metrics["rollout/branches_mean"] = branches / len(whole)
    scored = whole.select(whole.unscored == 0)
    metrics["rollout/reward_failed_frac"] = 1 - len(scored) / len(whole)
    for name, count in Counter(part for part, _, _ in rollouts.unscored_reasons).items():
        metrics[f"reward/{name}_failed_frac"] = count / len(whole)
    return metrics | (_compute_reward_metrics(scored) if len(scored) else {}) | _compute_length_metrics(whole)


def batch_metrics(batch: TrainBatch, seconds: float, world: int) -> dict[str, float]:
    """Of what a step of so many seconds trained on, on so many ranks: tokens per second on each; the mean of the
    advantages and their (population) variance over all action tokens, where there are advantages."""
    found = {"perf/tokens_per_second_per_rank": int(batch.lengths.sum()) / seconds / world}
    if batch.advantages is None:
        return found
    own = masked_select(batch.advantages, batch.loss_mask, torch.float64)
    count, whole = batch.all_reduce(torch.stack([own.new_tensor(len(own)), own.sum()])).tolist()
    if not count:
        return found
    mean = whole / count
    variance = float(batch.all_reduce((own - mean).square().sum())) / count
    return found | {"actor/advantage_mean": mean, "actor/advantage_variance": variance}


def _compute_reward_metrics(rollouts: Rollouts) -> dict[str, float]:
    rewards = rollouts.reward.tolist()
    metrics = {
        "rollout/reward_mean": statistics.fmean(rewards),
        "rollout/reward_std": statistics.pstdev(rewards),
        "rollout/reward_variance": statistics.pvariance(rewards),
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
    for source, among in mask_by_source(rollouts.source, rollouts.sources).items():
        metrics[f"rollout/reward_mean/{source}"] = statistics.fmean(rollouts.reward[among].tolist())
    return metrics


def _compute_length_metrics(rollouts: Rollouts) -> dict[str, float]:
    metrics = {
        "rollout/response_length_mean": _mean(rollouts.actions),
        "rollout/response_length_max": float(rollouts.actions.max()),
        "rollout/prompt_length_mean": _mean(rollouts.prompt_length),
        "rollout/length_max": float(rollouts.length.max()),
        "rollout/turns_mean": _mean(rollouts.turns),
        "rollout/tool_calls_mean": _mean(rollouts.tool_calls),
        "rollout/tool_errors": float(rollouts.tool_errors.sum()),
        "rollout/no_tool_frac": _mean(rollouts.tool_calls == 0),
        "rollout/truncated_frac": _mean(rollouts.has_status("length")),
        "rollout/max_turns_frac": _mean(rollouts.has_status("max_turns")),
    }
    if drafted := int(rollouts.drafted.sum()):
        metrics["rollout/draft_accepted"] = int(rollouts.accepted.sum()) / drafted
    if supported := int(rollouts.sampling_mask_sizes.sum()):
        metrics["rollout/support_mean"] = supported / int(rollouts.actions.sum())
    for source, among in mask_by_source(rollouts.source, rollouts.sources).items():
        metrics[f"rollout/response_length_mean/{source}"] = _mean(rollouts.actions[among])
        metrics[f"rollout/count/{source}"] = float(among.sum())
    return metrics


class SourceMeans:
    """Means over all items of an evaluation, which come a batch at a time, and over those of each source."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, list[float]]] = {}  # figure -> source -> its sum and that of the weights

    def add(self, figure: str, sums: torch.Tensor, weights: torch.Tensor, rollouts: Rollouts) -> None:
        """sums: [N] of each rollout what it adds; weights: [N] of how much, such as tokens."""
        of_figure = self._sums.setdefault(figure, {})
        for number, source in enumerate(rollouts.sources):
            among = rollouts.source == number
            both = of_figure.setdefault(source, [0.0, 0.0])
            both[0] += float(sums[among].sum(dtype=torch.float64))
            both[1] += float(weights[among].sum(dtype=torch.float64))

    def result(self) -> dict[str, float]:
        """`<figure>`, and from 2 to `MAX_SOURCES` sources `<figure>/<source>`."""
        means = {}
        for figure, of_figure in self._sums.items():
            sums, weights = zip(*of_figure.values(), strict=True)
            means[figure] = math.fsum(sums) / math.fsum(weights)
            if 1 < len(of_figure) <= MAX_SOURCES:
                means |= {
                    f"{figure}/{name or DEFAULT_SOURCE}": value / weight for name, (value, weight) in of_figure.items()
                }
        return means


def mask_by_source(source: torch.Tensor, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """[N] bool for each source by its name: which of the N are of it. Of those that occur; empty for a single one, and
    for more than `MAX_SOURCES`, whose figures nobody would read."""
    found = torch.unique(source).tolist()
    if not 1 < len(found) <= MAX_SOURCES:
        return {}
    return {names[number] or DEFAULT_SOURCE: source == number for number in found}


def _mean(numbers: torch.Tensor) -> float:
    """Of whole numbers, or of what is true or not."""
    return int(numbers.sum()) / len(numbers)
