"""Evaluation metrics per data source and over all: mean rewards with confidence intervals, and pass@k.

Intervals are percentile bootstrap intervals (Efron 1979, Bootstrap Methods: Another Look at the Jackknife) over
prompts, not over answers: the answers to a prompt depend on each other.

pass@k is the unbiased estimate 1 - C(n - c, k) / C(n, k) from n samples of which c are right: Chen et al., Evaluating
Large Language Models Trained on Code (arXiv:2107.03374), equation 1. The plug-in estimate 1 - (1 - c / n)^k is biased
(their appendix A).

`iter_json_rows` writes the answers as JSON lines, for readers without this package.
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
"""Numbers that are drawn at a time."""


def bootstrap_interval(
    values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES, level: float = CONFIDENCE
) -> tuple[float, float]:
    """(low, high) of the mean of `values`, one for each prompt. The same seed gives the same interval.

    Of a single value it is that value, which says nothing. Raises ValueError for none, and for values that are not
    finite.
    """
    given = np.asarray(values, dtype=np.float64)
    if not len(given) or not np.isfinite(given).all():
        raise ValueError("an interval needs values, and finite ones")
    draw, means = np.random.default_rng(seed), np.empty(resamples)
    rows = max(_CHUNK_SIZE // len(given), 1)
    for begin in range(0, resamples, rows):
        end = min(begin + rows, resamples)
        means[begin:end] = given[draw.integers(len(given), size=(end - begin, len(given)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The estimate for one problem. samples: how many answers there are, `right` of them right, 1 <= k <= samples.

    As the product of 1 - k / i over i from n - c + 1 to n, so that no number is larger than 1. Raises ValueError.
    """
    if not 0 <= right <= samples:
        raise ValueError(f"{right} of {samples} answers cannot be right")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs {k} answers to a problem at least, and at least 1; there are {samples}")
    if samples - right < k:
        return 1.0
    none = 1.0
    for count in range(samples - right + 1, samples + 1):
        none *= 1.0 - k / count
    return 1.0 - none


CORRECT_REWARD = 0.5
"""An answer whose reward is this or more is right, where nobody says otherwise."""
ALL = "all"
TRUNCATED_STATUSES = ("length", "max_turns")
"""Status of an answer that a length or the number of turns ended."""


DEFAULT_SOURCE = "unnamed"
"""A source of answers whose prompts have none."""


@dataclass(frozen=True)
class ScoredResponse:
    """What the figures need of a rollout. prompt: unique among all; tokens: the policy's own."""

    prompt_id: str
    source: str
    reward: float
    is_truncated: bool
    num_tokens: int

    @classmethod
    def from_rollout(cls, rollout: Rollout, unnamed: str = DEFAULT_SOURCE) -> ScoredResponse:
        """Of one with a reward. unnamed: its source where it has none."""
        prompt = rollout.prompt
        cut_off = rollout.status in TRUNCATED_STATUSES
        return cls(prompt.id, prompt.data_source or unnamed, rollout.reward, cut_off, rollout.num_actions)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and its interval of 95 %, bootstrapped over them."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class EvalMetrics:
    """Of a data source. reward: of each prompt the mean of its answers, of these the mean. cut_off, tokens: means over
    answers. pass_at: by k, over those prompts that have k scored answers, `pass_prompts` of them."""

    prompts: int
    answers: int
    reward: Estimate
    cut_off: float
    tokens: float
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    pass_prompts: Mapping[int, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values; keys are texts."""
        tree = asdict(self)
        tree["pass_at"] = {str(k): asdict(one) for k, one in self.pass_at.items()}
        tree["pass_prompts"] = {str(k): count for k, count in self.pass_prompts.items()}
        return tree


def collect_scored(rollouts: Iterable[Rollout], unnamed: str = DEFAULT_SOURCE) -> list[ScoredResponse]:
    """Those that have a reward: not aborted, and no part of it failed. An episode in branches counts once."""
    found, seen = [], set()
    for one in rollouts:
        if one.status == "aborted" or one.unscored:
            continue
        if one.episode >= 0:
            key = (one.group, one.episode)
            if key in seen:
                continue
            seen.add(key)
        found.append(ScoredResponse.from_rollout(one, unnamed))
    return found


def compute_metrics(
    answers: Sequence[ScoredResponse], ks: Sequence[int], right: float = CORRECT_REWARD, seed: int = 0
) -> dict[str, EvalMetrics]:
    """By data source, in the order in which they come; where there are several, `all` of them together besides."""
    sources: dict[str, list[ScoredResponse]] = {}
    for one in answers:
        sources.setdefault(one.source, []).append(one)
    found = {name: _compute_source_metrics(among, ks, right, seed) for name, among in sources.items()}
    if len(found) > 1:
        found[ALL if ALL not in found else f"({ALL})"] = _compute_source_metrics(answers, ks, right, seed)
    return found


def _compute_source_metrics(
    answers: Sequence[ScoredResponse], ks: Sequence[int], right: float, seed: int
) -> EvalMetrics:
    prompts: dict[str, list[float]] = {}
    for one in answers:
        prompts.setdefault(one.prompt_id, []).append(one.reward)
    pass_at, pass_prompts = {}, {}
    for k in ks:
        each = [
            pass_at_k(len(rewards), sum(reward >= right for reward in rewards), k)
            for rewards in prompts.values()
            if len(rewards) >= k
        ]
        pass_prompts[k] = len(each)
        if each:
            pass_at[k] = _estimate(each, seed)
    return EvalMetrics(
        prompts=len(prompts),
        answers=len(answers),
        reward=_estimate([statistics.fmean(rewards) for rewards in prompts.values()], seed),
        cut_off=statistics.fmean(one.is_truncated for one in answers),
        tokens=statistics.fmean(one.num_tokens for one in answers),
        pass_at=pass_at,
        pass_prompts=pass_prompts,
    )


def _estimate(values: Sequence[float], seed: int) -> Estimate:
    return Estimate(statistics.fmean(values), *bootstrap_interval(values, seed))


def format_table(found: Mapping[str, EvalMetrics], ks: Sequence[int]) -> str:
    """For the terminal: a line for each data source."""
    head = ["source", "prompts", "answers", "reward [95 %]", *(f"pass@{k} [95 %]" for k in ks), "cut off", "tokens"]
    lines = [head]
    for name, one in found.items():
        lines.append(
            [
                "".join(char if char.isprintable() else "?" for char in name)[:60],
                str(one.prompts),
                str(one.answers),
                _cell(one.reward),
                *(_cell(one.pass_at.get(k)) for k in ks),
                f"{100 * one.cut_off:.1f} %",
                f"{one.tokens:.1f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        "  ".join(cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in enumerate(pairs))
        for pairs in (zip(line, widths, strict=True) for line in lines)
    ]
    return "\n".join(row.rstrip() for row in rows)


def _cell(one: Estimate | None) -> str:
    if one is None or math.isnan(one.value):
        return "-"
    return f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"


def iter_json_rows(
    rollouts: Iterable[Rollout], right: float, unnamed: str = DEFAULT_SOURCE
) -> Iterator[dict[str, Any]]:
    """`right`: from which reward on an answer is right; unnamed: as of `ScoredResponse.from_rollout`. `reward` and `right` are null where
    it was aborted or a part of its reward failed; `messages` are in OpenAI's format, the prompt's first."""
    for one in rollouts:
        has_reward = one.status != "aborted" and not one.unscored
        yield {
            "id": one.prompt.id,
            "data_source": one.prompt.data_source or unnamed,
            "group": one.group,
            "reward": one.reward if has_reward else None,
            "right": one.reward >= right if has_reward else None,
            "status": one.status,
            "turns": sum(turn.is_action for turn in one.turns),
            "tokens": one.num_actions,
            "ground_truth": one.prompt.ground_truth,
            "messages": list(one.messages or one.prompt.messages),
        }
