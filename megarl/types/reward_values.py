"""What comes of asking for a reward: a `Reward`, or the words for why there is none."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.config.strict import ConfigError


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
class RewardFailure:
    """There is no reward."""

    reason: str
    """In one line; the same for all samples that fail alike."""


RewardResult = Reward | RewardFailure

ServiceReward = tuple[float, dict[str, float]]
"""What a service adds to a rollout's reward, and the parts of it by name."""

MAX_REWARD = 1e6
"""Beyond it fp32 can no longer tell advantages apart: squares that are summed have 24 bits."""


class RewardError(ConfigError):
    """A reward that raised, took too long, or is something else than a number."""


def parse_reward(value: Any, turns: int, about: str = "it") -> Reward:
    """What a function has returned for a rollout with so many turns of the policy's, made sense of.

    Raises RewardError, which begins with `about`, for anything but finite numbers of at most `LARGEST` where they
    belong.
    """
    if isinstance(value, Mapping):
        if unknown := [name for name in value if name not in ("reward", "parts", "turns")]:
            raise RewardError(f"{about} returned {unknown[0]!r}, which is none of reward, parts, turns")
        if "reward" not in value and value.get("turns") is None:
            raise RewardError(f"{about} returned neither `reward` nor `turns`")
        given = {name: item for name, item in value.items() if item is not None or name == "reward"}
        value = Reward(**given)
    if not isinstance(value, Reward):
        return Reward(parse_number(value, about))
    if not isinstance(value.parts, Mapping) or not all(isinstance(name, str) and name for name in value.parts):
        raise RewardError(f"{about} returned `parts` that are no mapping of names to numbers")
    of_turns = value.turns.tolist() if hasattr(value.turns, "tolist") else value.turns
    if not isinstance(of_turns, list | tuple):
        raise RewardError(f"{about} returned `turns` that are a {type(of_turns).__name__}, not a list of numbers")
    if of_turns and len(of_turns) != turns:
        raise RewardError(f"{about} returned {len(of_turns)} `turns` for {turns} turns of the policy's")
    found = Reward(
        parse_number(value.reward, about),
        {name: parse_number(part, f"{about}, part {name},") for name, part in value.parts.items()},
        tuple(parse_number(turn, f"{about}, turn {number},") for number, turn in enumerate(of_turns)),
    )
    parse_number(sum_reward(found), f"{about}, with its turns,")
    return found


def parse_model_score(score: float) -> RewardResult:
    """What a model's score of a conversation comes to."""
    try:
        return Reward(parse_number(score, "the model"))
    except RewardError as error:
        return RewardFailure(f"{error} (reward.model)")


def sum_reward(reward: Reward) -> float:
    """Of the conversation as a whole and of its turns."""
    return math.fsum((reward.reward, *reward.turns))


def parse_number(value: Any, about: str) -> float:
    """A number that a reward may be. Raises RewardError, which begins with `about`, for what is none."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a scalar of numpy or torch
    if not isinstance(value, bool | int | float):
        try:
            shown = repr(str(value)[:80])
        except Exception:  # its __str__ is a user's, too
            shown = "which cannot be shown"
        if isinstance(value, Awaitable):
            shown = "which nobody awaits: make it a function by `async def`"
        raise RewardError(f"{about} returned a {type(value).__name__}, {shown}; it must return a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise RewardError(f"{about} returned {value}; it must return a finite number")
    if abs(value) > MAX_REWARD:
        size = f"{value:g}" if isinstance(value, float) or value.bit_length() < 1000 else "a number of many digits"
        raise RewardError(
            f"{about} returned {size}; beyond {MAX_REWARD:g} the advantages of all others drown in fp32: scale it"
        )
    return float(value)
