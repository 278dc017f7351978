"""What comes of asking for a reward: a `Reward`, or the words for why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reward:
    """What a reward function may return in place of a number; a dict with these keys will do as well.

    return {"reward": 1.0, "parts": {"format": 0.5}, "turns": [0.0, -0.1]}
    """

    reward: float = 0.0
    """Of the conversation as a whole."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Figures that are recorded and logged beside it, by name; they are not added to it."""
    turns: Sequence[float] = ()
    """What each turn of the policy's is worth by itself, which is added; empty where that is nothing."""


@dataclass(frozen=True)
class Failed:
    """There is no reward."""

    why: str
    """In one line; the same for all samples that fail alike."""


Verdict = Reward | Failed
