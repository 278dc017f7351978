"""Results of computing a reward: a `Reward`, or a `RewardFailure` with its reason."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.config.strict import ConfigError


@dataclass(frozen=True)
class Reward:
    """What a reward function may return instead of a number. A dict with these keys works as well.

    return {"reward": 1.0, "parts": {"format": 0.5}, "turns": [0.0, -0.1]}
    """

    reward: float = 0.0
    """Reward of the whole conversation."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named values that are recorded and logged but not added to the reward."""
    turns: Sequence[float] = ()
    """Reward of each of the policy's turns, added to the total. Empty if turns have no rewards of their own."""


@dataclass(frozen=True)
class RewardFailure:
    """A reward that could not be computed."""

    reason: str
    """One line, equal for all samples that fail for the same reason."""


RewardResult = Reward | RewardFailure

MAX_REWARD = 1e6
"""Above it fp32 cannot distinguish advantages: sums of squares have 24 bits."""


class RewardError(ConfigError):
    """A reward function raised, timed out, or did not return a number."""


def parse_reward(value: Any, turns: int, subject: str = "it") -> Reward:
    """Parse the return value of a reward function for a rollout with `turns` turns of the policy.

    Raises RewardError, prefixed with `subject`, unless all values are finite numbers of at most `MAX_REWARD`.
    """
    if isinstance(value, Mapping):
        if unknown := [name for name in value if name not in ("reward", "parts", "turns")]:
            raise RewardError(f"{subject} returned {unknown[0]!r}, which is not reward, parts or turns")
        if "reward" not in value and value.get("turns") is None:
            raise RewardError(f"{subject} returned neither `reward` nor `turns`")
        value = Reward(**{name: item for name, item in value.items() if item is not None or name == "reward"})
    if not isinstance(value, Reward):
        return Reward(parse_number(value, subject))
    if not isinstance(value.parts, Mapping) or not all(isinstance(name, str) and name for name in value.parts):
        raise RewardError(f"{subject} returned `parts` that are not a mapping of names to numbers")
    turn_rewards = value.turns.tolist() if hasattr(value.turns, "tolist") else value.turns
    if not isinstance(turn_rewards, list | tuple):
        raise RewardError(f"{subject} returned `turns` that are a {type(turn_rewards).__name__}, not a list of numbers")
    if turn_rewards and len(turn_rewards) != turns:
        raise RewardError(f"{subject} returned {len(turn_rewards)} `turns` for {turns} turns of the policy's")
    result = Reward(
        parse_number(value.reward, subject),
        {name: parse_number(part, f"{subject}, part {name},") for name, part in value.parts.items()},
        tuple(parse_number(turn, f"{subject}, turn {index},") for index, turn in enumerate(turn_rewards)),
    )
    parse_number(sum_reward(result), f"{subject}, with its turns,")
    return result


def parse_model_score(score: float) -> RewardResult:
    """Convert a reward model's score of a conversation."""
    try:
        return Reward(parse_number(score, "the model"))
    except RewardError as error:
        return RewardFailure(f"{error} (reward.model)")


def sum_reward(reward: Reward) -> float:
    """Return the total reward: that of the conversation plus those of its turns."""
    return math.fsum((reward.reward, *reward.turns))


def parse_number(value: Any, subject: str) -> float:
    """Return `value` as a float. Raises RewardError, prefixed with `subject`, if it cannot be a reward."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a scalar of numpy or torch
    if not isinstance(value, bool | int | float):
        try:
            text = repr(str(value)[:80])
        except Exception:  # __str__ is user code
            text = "which cannot be displayed"
        if isinstance(value, Awaitable):
            text = "which is not awaited: make it a function by `async def`"
        raise RewardError(f"{subject} returned a {type(value).__name__}, {text}; it must return a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise RewardError(f"{subject} returned {value}; it must return a finite number")
    if abs(value) > MAX_REWARD:
        size = f"{value:g}" if isinstance(value, float) or value.bit_length() < 1000 else "a number of many digits"
        raise RewardError(
            f"{subject} returned {size}; beyond {MAX_REWARD:g} all other advantages vanish in fp32: scale it"
        )
    return float(value)
