"""A few rollouts of a step in words, for trackers that have tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from megarl.observe.trackers.sink import Row
from megarl.types import Rollout

MOST = 4
"""Rollouts of a step."""
LONGEST = 1000
"""Characters of a cell."""


def rows_of(step: int, rollouts: Sequence[Rollout]) -> list[Row]:
    """By `sink.COLUMNS`: the first sample of each of the first prompts."""
    firsts: dict[int, Rollout] = {}
    for rollout in rollouts:
        firsts.setdefault(rollout.group, rollout)
    return [
        (step, _short(_asked(one)), _short(one.answer), float(one.reward), one.num_tokens, one.status)
        for one in islice(firsts.values(), MOST)
    ]


def _asked(rollout: Rollout) -> str:
    said = [message for message in rollout.prompt.messages if message.get("role") == "user"]
    return str(said[-1].get("content") or "") if said else ""


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."
