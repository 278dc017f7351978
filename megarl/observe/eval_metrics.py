"""Evaluation metrics, overall and per data source: mean reward with confidence interval, and pass@k.

Confidence intervals are percentile bootstrap intervals (Efron 1979, Bootstrap Methods: Another Look at the Jackknife).
They resample prompts, not responses, because the responses to one prompt are correlated.

pass@k is the unbiased estimator 1 - C(n - c, k) / C(n, k) for n samples of which c are correct: Chen et al., Evaluating
Large Language Models Trained on Code (arXiv:2107.03374), equation 1. The plug-in estimator 1 - (1 - c / n)^k is biased
(their appendix A).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.types import Rollout

RESAMPLES = 2000
CONFIDENCE = 0.95
_CHUNK_SIZE = 1 << 22
"""Random indices drawn at a time; bounds peak memory."""


def bootstrap_interval(
    values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES, level: float = CONFIDENCE
) -> tuple[float, float]:
    """Return the (low, high) bootstrap interval of the mean of `values`, one value per prompt.

    Deterministic for a given seed. A single value yields a degenerate interval of that value. Raises ValueError if
    `values` is empty or has non-finite entries.
    """
    array = np.asarray(values, dtype=np.float64)
    if not len(array) or not np.isfinite(array).all():
        raise ValueError("an interval needs finite values")
    rng, means = np.random.default_rng(seed), np.empty(resamples)
    chunk_rows = max(_CHUNK_SIZE // len(array), 1)
    for start in range(0, resamples, chunk_rows):
        end = min(start + chunk_rows, resamples)
        means[start:end] = array[rng.integers(len(array), size=(end - start, len(array)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased pass@k estimate for one prompt with `num_correct` correct out of `num_samples` responses.

    Computed as 1 minus the product of 1 - k / i for i from n - c + 1 to n, whose factors stay below 1 and so cannot
    overflow. Raises ValueError unless 0 <= right <= samples and 1 <= k <= samples.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} of {num_samples} answers cannot be right")
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} answers to a problem, and at least 1; there are {num_samples}")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


CORRECT_REWARD = 0.5
"""Default threshold: a response with at least this reward counts as correct."""
ALL = "all"
TRUNCATED_STATUSES = ("length", "max_turns")
"""Statuses of responses that hit a length or turn limit."""
DEFAULT_SOURCE = "unnamed"
"""Name for prompts without a data source."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its bootstrap interval at level `CONFIDENCE`."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float], seed: int) -> Estimate:
        return Estimate(statistics.fmean(values), *bootstrap_interval(values, seed))

    def __str__(self) -> str:
        return "-" if math.isnan(self.value) else f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class EvalMetrics:
    """Metrics of one data source.

    Args:
        reward: mean over prompts of each prompt's mean reward.
        cut_off: fraction of responses that were truncated.
        tokens: mean response length, of the policy's tokens only.
        pass_at: pass@k by k, over the prompts with at least k scored responses.
        pass_prompts: number of those prompts, by k.
    """

    prompts: int
    answers: int
    reward: Estimate
    cut_off: float
    tokens: float
    pass_at: Mapping[int, Estimate]
    pass_prompts: Mapping[int, int]


def has_reward(rollout: Rollout) -> bool:
    """Return whether a rollout was not aborted and no part of its reward failed."""
    return rollout.status != "aborted" and not rollout.unscored


def select_scored(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Return the rollouts that have a reward. An episode with branches counts once."""
    scored, episodes = [], set()
    for rollout in filter(has_reward, rollouts):
        episode = rollout.group, rollout.episode
        if rollout.episode < 0 or episode not in episodes:
            episodes.add(episode)
            scored.append(rollout)
    return scored


def compute_metrics(
    rollouts: Sequence[Rollout],
    ks: Sequence[int],
    correct_threshold: float = CORRECT_REWARD,
    seed: int = 0,
    default_source: str = DEFAULT_SOURCE,
) -> dict[str, EvalMetrics]:
    """Return metrics of rollouts with a reward by data source in order of appearance, plus `all` of several sources.

    default_source: name for prompts without a data source.
    """
    sources: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        sources.setdefault(rollout.prompt.data_source or default_source, []).append(rollout)
    if len(sources) > 1:
        sources[ALL if ALL not in sources else f"({ALL})"] = list(rollouts)
    return {name: _compute_source_metrics(part, ks, correct_threshold, seed) for name, part in sources.items()}


def _compute_source_metrics(
    rollouts: Sequence[Rollout], ks: Sequence[int], correct_threshold: float, seed: int
) -> EvalMetrics:
    prompts: dict[str, list[float]] = {}
    for rollout in rollouts:
        prompts.setdefault(rollout.prompt.id, []).append(rollout.reward)
    pass_rates = {
        k: [
            pass_at_k(len(rewards), sum(reward >= correct_threshold for reward in rewards), k)
            for rewards in prompts.values()
            if len(rewards) >= k
        ]
        for k in ks
    }
    return EvalMetrics(
        prompts=len(prompts),
        answers=len(rollouts),
        reward=Estimate.of([statistics.fmean(rewards) for rewards in prompts.values()], seed),
        cut_off=statistics.fmean(rollout.status in TRUNCATED_STATUSES for rollout in rollouts),
        tokens=statistics.fmean(rollout.num_actions for rollout in rollouts),
        pass_at={k: Estimate.of(rates, seed) for k, rates in pass_rates.items() if rates},
        pass_prompts={k: len(rates) for k, rates in pass_rates.items()},
    )


def format_table(metrics_by_source: Mapping[str, EvalMetrics], ks: Sequence[int]) -> str:
    """Format a table for the terminal, one line per data source."""
    header = ["source", "prompts", "answers", "reward [95 %]", *(f"pass@{k} [95 %]" for k in ks), "cut off", "tokens"]
    lines = [header]
    for name, metrics in metrics_by_source.items():
        printable_name = "".join(char if char.isprintable() else "?" for char in name)[:60]
        counts, pass_rates = (metrics.prompts, metrics.answers), (metrics.pass_at.get(k, "-") for k in ks)
        cells = (*counts, metrics.reward, *pass_rates, f"{100 * metrics.cut_off:.1f} %", f"{metrics.tokens:.1f}")
        lines.append([printable_name, *map(str, cells)])
    first_width, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([name.ljust(first_width), *map(str.rjust, cells, widths)]) for name, *cells in lines)


def iter_json_rows(
    rollouts: Iterable[Rollout], correct_threshold: float, default_source: str = DEFAULT_SOURCE
) -> Iterator[dict[str, Any]]:
    """Yield one JSON-serializable row per rollout.

    `reward` and `right` (at least `correct_threshold`) are null if the rollout was aborted or a reward part failed.
    `messages` are in OpenAI's format and start with the prompt's. default_source: as in `compute_metrics`.
    """
    for rollout in rollouts:
        is_scored = has_reward(rollout)
        yield {
            "id": rollout.prompt.id,
            "data_source": rollout.prompt.data_source or default_source,
            "group": rollout.group,
            "reward": rollout.reward if is_scored else None,
            "right": rollout.reward >= correct_threshold if is_scored else None,
            "status": rollout.status,
            "turns": sum(turn.is_action for turn in rollout.turns),
            "tokens": rollout.num_actions,
            "ground_truth": rollout.prompt.ground_truth,
            "messages": list(rollout.messages or rollout.prompt.messages),
        }
