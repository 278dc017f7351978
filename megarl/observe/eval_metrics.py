"""Evaluation metrics, overall and per data source: mean reward with confidence interval, and pass@k.

Confidence intervals are percentile bootstrap intervals (Efron 1979, Bootstrap Methods: Another Look at the Jackknife).
They resample prompts, not responses, because the responses to one prompt are correlated.

pass@k is the unbiased estimator 1 - C(n - c, k) / C(n, k) for n samples of which c are correct: Chen et al., Evaluating
Large Language Models Trained on Code (arXiv:2107.03374), equation 1. The plug-in estimator 1 - (1 - c / n)^k is biased
(their appendix A).

`iter_json_rows` exports the responses as JSON rows for readers without this package.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    fail_prob = 1.0
    for i in range(num_samples - num_correct + 1, num_samples + 1):
        fail_prob *= 1.0 - k / i
    return 1.0 - fail_prob


CORRECT_REWARD = 0.5
"""Default threshold: a response with at least this reward counts as correct."""
ALL = "all"
TRUNCATED_STATUSES = ("length", "max_turns")
"""Statuses of responses that hit a length or turn limit."""


DEFAULT_SOURCE = "unnamed"
"""Name for prompts without a data source."""


@dataclass(frozen=True)
class ScoredResponse:
    """The fields of a rollout that evaluation metrics need.

    `prompt_id` is unique over all prompts; `num_tokens` counts the policy's tokens only.
    """

    prompt_id: str
    source: str
    reward: float
    is_truncated: bool
    num_tokens: int

    @classmethod
    def from_rollout(cls, rollout: Rollout, default_source: str = DEFAULT_SOURCE) -> ScoredResponse:
        """Build from a rollout that has a reward. unnamed: source name if the prompt has none."""
        prompt = rollout.prompt
        is_truncated = rollout.status in TRUNCATED_STATUSES
        return cls(prompt.id, prompt.data_source or default_source, rollout.reward, is_truncated, rollout.num_actions)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its bootstrap interval at level `CONFIDENCE`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class EvalMetrics:
    """Metrics of one data source.

    Args:
        reward: mean over prompts of each prompt's mean reward.
        cut_off: fraction of responses that were truncated.
        tokens: mean response length.
        pass_at: pass@k by k, over the prompts with at least k scored responses.
        pass_prompts: number of those prompts, by k.
    """

    prompts: int
    answers: int
    reward: Estimate
    cut_off: float
    tokens: float
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    pass_prompts: Mapping[int, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; keys are strings."""
        tree = asdict(self)
        tree["pass_at"] = {str(k): asdict(estimate) for k, estimate in self.pass_at.items()}
        tree["pass_prompts"] = {str(k): count for k, count in self.pass_prompts.items()}
        return tree


def collect_scored(rollouts: Iterable[Rollout], default_source: str = DEFAULT_SOURCE) -> list[ScoredResponse]:
    """Return responses that have a reward: not aborted, no reward part failed. An episode with branches counts once."""
    scored, seen = [], set()
    for rollout in rollouts:
        if rollout.status == "aborted" or rollout.unscored:
            continue
        if rollout.episode >= 0:
            key = (rollout.group, rollout.episode)
            if key in seen:
                continue
            seen.add(key)
        scored.append(ScoredResponse.from_rollout(rollout, default_source))
    return scored


def compute_metrics(
    responses: Sequence[ScoredResponse], ks: Sequence[int], correct_threshold: float = CORRECT_REWARD, seed: int = 0
) -> dict[str, EvalMetrics]:
    """Return metrics by data source in order of appearance, plus `all` if there are several sources."""
    sources: dict[str, list[ScoredResponse]] = {}
    for response in responses:
        sources.setdefault(response.source, []).append(response)
    metrics = {
        name: _compute_source_metrics(source_responses, ks, correct_threshold, seed)
        for name, source_responses in sources.items()
    }
    if len(metrics) > 1:
        metrics[ALL if ALL not in metrics else f"({ALL})"] = _compute_source_metrics(
            responses, ks, correct_threshold, seed
        )
    return metrics


def _compute_source_metrics(
    responses: Sequence[ScoredResponse], ks: Sequence[int], correct_threshold: float, seed: int
) -> EvalMetrics:
    prompts: dict[str, list[float]] = {}
    for response in responses:
        prompts.setdefault(response.prompt_id, []).append(response.reward)
    pass_at, pass_prompts = {}, {}
    for k in ks:
        estimates = [
            pass_at_k(len(rewards), sum(reward >= correct_threshold for reward in rewards), k)
            for rewards in prompts.values()
            if len(rewards) >= k
        ]
        pass_prompts[k] = len(estimates)
        if estimates:
            pass_at[k] = _estimate(estimates, seed)
    return EvalMetrics(
        prompts=len(prompts),
        answers=len(responses),
        reward=_estimate([statistics.fmean(rewards) for rewards in prompts.values()], seed),
        cut_off=statistics.fmean(response.is_truncated for response in responses),
        tokens=statistics.fmean(response.num_tokens for response in responses),
        pass_at=pass_at,
        pass_prompts=pass_prompts,
    )


def _estimate(values: Sequence[float], seed: int) -> Estimate:
    return Estimate(statistics.fmean(values), *bootstrap_interval(values, seed))


def format_table(metrics_by_source: Mapping[str, EvalMetrics], ks: Sequence[int]) -> str:
    """Format a table for the terminal, one line per data source."""
    header = ["source", "prompts", "answers", "reward [95 %]", *(f"pass@{k} [95 %]" for k in ks), "cut off", "tokens"]
    lines = [header]
    for name, metrics in metrics_by_source.items():
        lines.append(
            [
                "".join(char if char.isprintable() else "?" for char in name)[:60],
                str(metrics.prompts),
                str(metrics.answers),
                _cell(metrics.reward),
                *(_cell(metrics.pass_at.get(k)) for k in ks),
                f"{100 * metrics.cut_off:.1f} %",
                f"{metrics.tokens:.1f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        "  ".join(
            cell.ljust(width) if not column_index else cell.rjust(width)
            for column_index, (cell, width) in enumerate(pairs)
        )
        for pairs in (zip(line, widths, strict=True) for line in lines)
    ]
    return "\n".join(row.rstrip() for row in rows)


def _cell(estimate: Estimate | None) -> str:
    if estimate is None or math.isnan(estimate.value):
        return "-"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def iter_json_rows(
    rollouts: Iterable[Rollout], correct_threshold: float, default_source: str = DEFAULT_SOURCE
) -> Iterator[dict[str, Any]]:
    """Yield one JSON-serializable row per rollout.

    `reward` and `right` are null if the rollout was aborted or a reward part failed. `messages` are in OpenAI's format
    and start with the prompt's.

    Args:
        correct_threshold: reward from which on a response counts as correct.
        default_source: as in `ScoredResponse.from_rollout`.
    """
    for rollout in rollouts:
        has_reward = rollout.status != "aborted" and not rollout.unscored
        yield {
            "id": rollout.prompt.id,
            "data_source": rollout.prompt.data_source or default_source,
            "group": rollout.group,
            "reward": rollout.reward if has_reward else None,
            "right": rollout.reward >= correct_threshold if has_reward else None,
            "status": rollout.status,
            "turns": sum(turn.is_action for turn in rollout.turns),
            "tokens": rollout.num_actions,
            "ground_truth": rollout.prompt.ground_truth,
            "messages": list(rollout.messages or rollout.prompt.messages),
        }
