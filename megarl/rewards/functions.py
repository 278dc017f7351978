"""Reward functions: found by name, and what they return made sense of."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from megarl import forks
from megarl.config import ConfigError
from megarl.types import Rollout
from megarl.types.verdicts import Failed, Reward, Verdict

RewardFunction = Callable[[Rollout], Any]
"""Looks at a finished rollout and returns a number of at most `LARGEST`, where a bool counts as 0 or 1, or a `Reward`;
a coroutine function is awaited. It is given a copy of what could be changed, without the engine's records of routing
and of what could have been sampled."""

Parts = tuple[float, dict[str, float]]
"""What a service adds to a rollout's reward, and the parts of it by name."""

LARGEST = 1e6
"""Beyond it fp32 can no longer tell advantages apart: squares that are summed have 24 bits."""


class RewardError(ConfigError):
    """A reward that raised, took too long, or is something else than a number."""


def load_functions(names: Sequence[str]) -> dict[str, RewardFunction]:
    """The functions of `reward.functions`, each `module:name`, by name (by module:name where a name is taken).

    Raises ConfigError for a module that cannot be imported, a name that it lacks, what is no function of a rollout, and
    what is listed twice.
    """
    functions: dict[str, RewardFunction] = {}
    for name in names:
        if list(names).count(name) > 1:
            raise ConfigError(f"reward.functions: {name} is listed twice")
        function, attribute = forks.load(name, "reward.functions"), name.partition(":")[2]
        functions[attribute if attribute not in functions else name] = checked(function, f"reward.functions: {name}")
    return functions


def checked(function: Any, what: str) -> RewardFunction:
    """The function, if it can be called with a rollout and may return a number; else ConfigError."""
    if not callable(function):
        raise ConfigError(f"{what} is a {type(function).__name__}, not a function of a Rollout")
    if isinstance(function, type):
        raise ConfigError(f"{what} is a class, and calling it gives an object, not a number; name a function")
    if forks.is_generator(function):
        raise ConfigError(f"{what} is a generator; it must return a number when it is called")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"{what} must take a Rollout and nothing else: {error}") from None
    except ValueError:  # of C, which does not say
        pass
    return function  # type: ignore[no-any-return]


def reward_of(value: Any, turns: int, about: str = "it") -> Reward:
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
        return Reward(number_of(value, about))
    if not isinstance(value.parts, Mapping) or not all(isinstance(name, str) and name for name in value.parts):
        raise RewardError(f"{about} returned `parts` that are no mapping of names to numbers")
    of_turns = value.turns.tolist() if hasattr(value.turns, "tolist") else value.turns
    if not isinstance(of_turns, list | tuple):
        raise RewardError(f"{about} returned `turns` that are a {type(of_turns).__name__}, not a list of numbers")
    if of_turns and len(of_turns) != turns:
        raise RewardError(f"{about} returned {len(of_turns)} `turns` for {turns} turns of the policy's")
    found = Reward(
        number_of(value.reward, about),
        {name: number_of(part, f"{about}, part {name},") for name, part in value.parts.items()},
        tuple(number_of(turn, f"{about}, turn {number},") for number, turn in enumerate(of_turns)),
    )
    number_of(worth(found), f"{about}, with its turns,")
    return found


def of_model(score: float) -> Verdict:
    """What a model's score of a conversation comes to."""
    try:
        return Reward(number_of(score, "the model"))
    except RewardError as error:
        return Failed(f"{error} (reward.model)")


def worth(reward: Reward) -> float:
    """Of the conversation as a whole and of its turns."""
    return math.fsum((reward.reward, *reward.turns))


def number_of(value: Any, about: str) -> float:
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
    if abs(value) > LARGEST:
        size = f"{value:g}" if isinstance(value, float) or value.bit_length() < 1000 else "a number of many digits"
        raise RewardError(
            f"{about} returned {size}; beyond {LARGEST:g} the advantages of all others drown in fp32: scale it"
        )
    return float(value)
