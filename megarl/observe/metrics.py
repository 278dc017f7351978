"""Metrics of a batch of rollouts, under the names that RL users know.

`ZeroSpreadWarning` warns when all responses to each prompt have had the same reward for several steps, so that nothing
is learned. It applies to algorithms that learn only from differences between the samples of a prompt; a critic
distinguishes actions even if rewards are equal. It is not a guard: it costs nothing, changes nothing and is always on.
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
"""Consecutive zero-spread steps before warning; with few prompts a single one may be chance."""


class ZeroSpreadWarning:
    """Watches `ZERO_SPREAD` over a run. All ranks see the same metrics."""

    def __init__(self, requirements: Requirements) -> None:
        self._is_enabled = requirements.is_group_relative and "critic" not in requirements.roles
        self._is_refilled = requirements.has_dynamic_sampling
        self._zero_spread_steps = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return a warning after `WARN_AFTER_STEPS` zero-spread steps in a row, else an empty string.

        It warns again only after a step with spread. Steps without rewards are ignored.
        """
        if not self._is_enabled or ZERO_SPREAD not in metrics:
            return ""
        self._zero_spread_steps = self._zero_spread_steps + 1 if metrics[ZERO_SPREAD] == 1.0 else 0
        if self._zero_spread_steps != WARN_AFTER_STEPS:
            return ""
        mean = metrics["rollout/reward_mean"]
        remedy = "" if self._is_refilled else ", or set algorithm=dapo, which samples until prompts' rewards differ"
        return (
            f"step {step}: for {WARN_AFTER_STEPS} steps all answers to each prompt have had the same reward "
            f"({ZERO_SPREAD} 1, mean {mean:.3g}): they do not distinguish answers, and nothing is learned from them. "
            "Read some answers (tools/view_rollouts.py): does the reward recognize right answers? If so, use easier "
            "prompts if all are wrong (or sft first), harder ones if all are right; or raise "
            "rollout.samples_per_prompt or "
            f"rollout.temperature{remedy}"
        )


MAX_SOURCES = 32
"""Metrics are split by data source only up to this many sources."""
DEFAULT_SOURCE = "other"
"""Source in metric names for prompts without `data_source`."""


def prefix_metrics(metrics: Mapping[str, float], policy: str) -> dict[str, float]:
    """Return the metrics of another policy than the first under `<policy>/`, except those of guards, whose names tell
    the role. policy: empty for the first."""
    return {name if not policy or name.startswith("guards/") else f"{policy}/{name}": metrics[name] for name in metrics}


def rollout_metrics(rollouts: Rollouts, num_speculative_tokens: int = 0) -> dict[str, float]:
    """Return `rollout/...` metrics averaged over the rollouts; empty for no rollouts.

    num_speculative_tokens: length of a draft (`rollout.num_speculative_tokens`).

    An episode with several branches counts as one rollout: its tokens, turns and tool calls are summed, its reward
    counts once. `branches_mean` is present if there are such episodes.

    - `response_length` (tokens) counts the policy's tokens only: neither the prompt nor tool results.
    - `tool_errors` is a total.
    - `zero_spread_frac` is the fraction of prompts whose samples all have the same reward, from which group-relative
      methods learn nothing; absent if every prompt was sampled once.
    - `spec_accept_rate` is the fraction of drafted tokens that were accepted, present if there were drafts.
      `spec_accept_length` is the mean number of tokens per verification: the accepted ones of a draft, and the one that
      the policy adds, so from 1 to 1 + `num_speculative_tokens`. vLLM may cut drafts short, each of which counts as a
      part of a verification: with it, an upper bound.
    - `sampling_mask_size_mean` is the mean number of tokens that the policy could sample from, present for truncated
      sampling.
    - `reward_mean/<source>`, `response_length_mean/<source>` and `count/<source>` (rollouts) are present for 2 to
      `MAX_SOURCES` data sources.
    - `aborted_frac` is the fraction of aborted rollouts. All other metrics exclude these, so it is the only one if all
      are aborted.
    - `reward_failed_frac` is the fraction of the others without a reward because a reward part failed;
      `reward/NAME_failed_frac` is the same for part NAME. Reward metrics exclude these rollouts.
    """
    if not len(rollouts):
        return {}
    num_branches = int((~rollouts.has_status("aborted")).sum())
    rollouts = rollouts.merge_branches()
    completed = rollouts.select(~rollouts.has_status("aborted"))
    metrics = {"rollout/aborted_frac": 1 - len(completed) / len(rollouts)}
    if not len(completed):
        return metrics
    if num_branches > len(completed):
        metrics["rollout/branches_mean"] = num_branches / len(completed)
    scored = completed.select(completed.unscored == 0)
    metrics["rollout/reward_failed_frac"] = 1 - len(scored) / len(completed)
    for name, count in Counter(part for part, _, _ in rollouts.unscored_reasons).items():
        metrics[f"reward/{name}_failed_frac"] = count / len(completed)
    metrics |= _compute_draft_metrics(completed, num_speculative_tokens)
    return metrics | (_compute_reward_metrics(scored) if len(scored) else {}) | _compute_length_metrics(completed)


def batch_metrics(batch: TrainBatch, seconds: float, world: int) -> dict[str, float]:
    """Return throughput and advantage metrics of a training batch. Collective if it has advantages.

    Advantage mean and (population) variance are over all action tokens; throughput is in tokens per second per rank.

    Args:
        seconds: duration of the step.
        world: number of ranks.
    """
    metrics = {"perf/tokens_per_second_per_rank": int(batch.lengths.sum()) / seconds / world}
    if batch.advantages is None:
        return metrics
    advantages = masked_select(batch.advantages, batch.loss_mask, torch.float64)
    count, total = batch.all_reduce(torch.stack([advantages.new_tensor(len(advantages)), advantages.sum()])).tolist()
    if not count:
        return metrics
    mean = total / count
    variance = float(batch.all_reduce((advantages - mean).square().sum())) / count
    return metrics | {"actor/advantage_mean": mean, "actor/advantage_variance": variance}


def _compute_draft_metrics(rollouts: Rollouts, num_speculative_tokens: int) -> dict[str, float]:
    drafted = int(rollouts.drafted.sum())
    if not drafted:
        return {}
    metrics = {"rollout/spec_accept_rate": int(rollouts.accepted.sum()) / drafted}
    if num_speculative_tokens:  # SGLang counts each verification as that of a whole draft; vLLM may cut some short
        metrics["rollout/spec_accept_length"] = 1 + num_speculative_tokens * metrics["rollout/spec_accept_rate"]
    return metrics


def _compute_reward_metrics(rollouts: Rollouts) -> dict[str, float]:
    rewards = rollouts.reward.tolist()
    metrics = {
        "rollout/reward_mean": statistics.fmean(rewards),
        "rollout/reward_std": statistics.pstdev(rewards),
        "rollout/reward_variance": statistics.pvariance(rewards),
        "rollout/reward_min": min(rewards),
        "rollout/reward_max": max(rewards),
    }
    _, group_index = torch.unique(rollouts.group, return_inverse=True)
    if (num_groups := int(group_index.max()) + 1) < len(rollouts):
        zeros = rollouts.reward.new_zeros(2, num_groups)
        lowest, highest = (
            zeros[i].scatter_reduce(0, group_index, rollouts.reward, reduce=reduction, include_self=False)
            for i, reduction in enumerate(("amin", "amax"))
        )
        metrics["rollout/zero_spread_frac"] = _mean(lowest == highest)
    parts = rollouts.reward_parts
    if len(parts) > 1 or any(not torch.equal(part, rollouts.reward) for part in parts.values()):
        for name, part in parts.items():  # a single part is the reward itself, unless weighted
            metrics[f"reward/{name}"] = statistics.fmean(part.tolist())
    for source, mask in mask_by_source(rollouts.source, rollouts.sources).items():
        metrics[f"rollout/reward_mean/{source}"] = statistics.fmean(rollouts.reward[mask].tolist())
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
    if support_total := int(rollouts.sampling_mask_sizes.sum()):
        metrics["rollout/sampling_mask_size_mean"] = support_total / int(rollouts.actions.sum())
    for source, mask in mask_by_source(rollouts.source, rollouts.sources).items():
        metrics[f"rollout/response_length_mean/{source}"] = _mean(rollouts.actions[mask])
        metrics[f"rollout/count/{source}"] = float(mask.sum())
    return metrics


class SourceMeans:
    """Accumulates weighted means over the batches of an evaluation, overall and per data source."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, list[float]]] = {}  # metric -> source -> [sum, sum of weights]

    def add(self, metric: str, sums: torch.Tensor, weights: torch.Tensor, rollouts: Rollouts) -> None:
        """Add a batch: [N] sums of the metric and weights per rollout, such as its tokens."""
        by_source = self._sums.setdefault(metric, {})
        for index, source in enumerate(rollouts.sources):
            mask = rollouts.source == index
            totals = by_source.setdefault(source, [0.0, 0.0])
            totals[0] += float(sums[mask].sum(dtype=torch.float64))
            totals[1] += float(weights[mask].sum(dtype=torch.float64))

    def result(self) -> dict[str, float]:
        """Return the mean per metric, and `<metric>/<source>` for 2 to `MAX_SOURCES` sources."""
        means = {}
        for metric, by_source in self._sums.items():
            sums, weights = zip(*by_source.values(), strict=True)
            means[metric] = math.fsum(sums) / math.fsum(weights)
            if 1 < len(by_source) <= MAX_SOURCES:
                means |= {
                    f"{metric}/{name or DEFAULT_SOURCE}": value / weight for name, (value, weight) in by_source.items()
                }
        return means


def mask_by_source(source: torch.Tensor, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return an [N] bool mask per source that occurs in `source`, for 2 to `MAX_SOURCES` sources; else empty."""
    source_ids = torch.unique(source).tolist()
    if not 1 < len(source_ids) <= MAX_SOURCES:
        return {}
    return {names[source_id] or DEFAULT_SOURCE: source == source_id for source_id in source_ids}


def _mean(numbers: torch.Tensor) -> float:
    """Return the mean of an integer or bool tensor."""
    return int(numbers.sum()) / len(numbers)
