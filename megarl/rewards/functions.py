"""Reward functions: found by name, called on finished rollouts, their sum written into the rollout."""

from __future__ import annotations

import importlib
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megarl.config import ConfigError
from megarl.types import Rollout

RewardFunction = Callable[[Rollout], float]
"""Looks at a finished rollout and returns a finite number; a bool counts as 0 or 1. It must not change the rollout."""


LARGEST = 3.4e38
"""Training computes in fp32, where what is above it is infinite."""


class RewardError(ConfigError):
    """A reward function that raised, or that returned something else than a number."""


def load_functions(names: Sequence[str]) -> dict[str, RewardFunction]:
    """The functions of `reward.functions`, each `module:name`, by name (by module:name where a name is taken).

    Raises ConfigError for a module that cannot be imported, a name that it lacks, and what is no function.
    """
    functions: dict[str, RewardFunction] = {}
    for name in names:
        module_name, colon, attribute = name.partition(":")
        if not (module_name and colon and attribute):
            raise ConfigError(f"reward.functions: {name!r} is not of the form module:name")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # whatever the user's module raises while it is imported
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"reward.functions: cannot import {module_name} of {name!r}: {reason}") from error
        function = getattr(module, attribute, None)
        if function is None:
            known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            have = ", ".join(known) or "no function"
            raise ConfigError(f"reward.functions: {module_name} has no {attribute!r}; it has {have}")
        if not callable(function):
            raise ConfigError(f"reward.functions: {name} is a {type(function).__name__}, not a function of a Rollout")
        key = attribute if attribute not in functions else name
        if key in functions:
            raise ConfigError(f"reward.functions: {name} is listed twice")
        functions[key] = function
    return functions


def score(rollouts: Sequence[Rollout], functions: Mapping[str, RewardFunction]) -> list[Rollout]:
    """New rollouts, in the same order: `reward_parts` holds each function's number by name, `reward` is their sum.

    Raises RewardError, naming the function and the sample, when a function raises or returns something else than a
    finite number.
    """
    scored = []
    for rollout in rollouts:
        parts = {name: _call(name, function, rollout) for name, function in functions.items()}
        scored.append(replace(rollout, reward=math.fsum(parts.values()), reward_parts=parts))
    return scored


def _call(name: str, function: RewardFunction, rollout: Rollout) -> float:
    about = f"reward function {name} on the sample {rollout.prompt.id!r}"
    try:
        value: Any = function(rollout)
    except Exception as error:  # whatever the user's function raises
        frames = traceback.extract_tb(error.__traceback__)
        text = " ".join(str(error).split())
        raise RewardError(
            f"{about} raised {type(error).__name__}: {text} ({frames[-1].filename}:{frames[-1].lineno})"
        ) from error
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a scalar of numpy or torch
    if not isinstance(value, bool | int | float):
        raise RewardError(f"{about} returned a {type(value).__name__}, {str(value)[:80]!r}; it must return a number")
    if not abs(value) <= LARGEST:
        shown = f"{value}" if isinstance(value, float) else f"an integer of {value.bit_length()} bits"
        raise RewardError(f"{about} returned {shown}; it must return a finite number, of fp32")
    return float(value)
