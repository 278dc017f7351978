"""The figures of an evaluation, for each data source and for all: out of answers that have been scored."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.evaluation.bootstrap import interval
from megarl.evaluation.pass_at_k import pass_at_k
from megarl.types import Rollout

RIGHT = 0.5
"""An answer whose reward is this or more is right, where nobody says otherwise."""
ALL = "all"
CUT_OFF = ("length", "max_turns")
"""Status of an answer that a length or the number of turns ended."""


UNNAMED = "unnamed"
"""A source of answers whose prompts have none."""


@dataclass(frozen=True)
class Answer:
    """What the figures need of a rollout. prompt: unique among all; tokens: the policy's own."""

    prompt: str
    source: str
    reward: float
    cut_off: bool
    tokens: int

    @classmethod
    def of(cls, rollout: Rollout, unnamed: str = UNNAMED) -> Answer:
        """Of one with a reward. unnamed: its source where it has none."""
        prompt = rollout.prompt
        cut_off = rollout.status in CUT_OFF
        return cls(prompt.id, prompt.data_source or unnamed, rollout.reward, cut_off, rollout.num_actions)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and its interval of 95 %, bootstrapped over them."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Figures:
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


def scored(rollouts: Iterable[Rollout], unnamed: str = UNNAMED) -> list[Answer]:
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
        found.append(Answer.of(one, unnamed))
    return found


def figures_of(answers: Sequence[Answer], ks: Sequence[int], right: float = RIGHT, seed: int = 0) -> dict[str, Figures]:
    """By data source, in the order in which they come; where there are several, `all` of them together besides."""
    sources: dict[str, list[Answer]] = {}
    for one in answers:
        sources.setdefault(one.source, []).append(one)
    found = {name: _of(among, ks, right, seed) for name, among in sources.items()}
    if len(found) > 1:
        found[ALL if ALL not in found else f"({ALL})"] = _of(answers, ks, right, seed)
    return found


def _of(answers: Sequence[Answer], ks: Sequence[int], right: float, seed: int) -> Figures:
    prompts: dict[str, list[float]] = {}
    for one in answers:
        prompts.setdefault(one.prompt, []).append(one.reward)
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
    return Figures(
        prompts=len(prompts),
        answers=len(answers),
        reward=_estimate([statistics.fmean(rewards) for rewards in prompts.values()], seed),
        cut_off=statistics.fmean(one.cut_off for one in answers),
        tokens=statistics.fmean(one.tokens for one in answers),
        pass_at=pass_at,
        pass_prompts=pass_prompts,
    )


def _estimate(values: Sequence[float], seed: int) -> Estimate:
    return Estimate(statistics.fmean(values), *interval(values, seed))


def table(found: Mapping[str, Figures], ks: Sequence[int]) -> str:
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
