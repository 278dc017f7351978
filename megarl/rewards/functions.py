"""Reward functions: found by name, called on finished rollouts, their sum written into the rollout."""

from __future__ import annotations

import copy
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl import forks
from megarl.config import ConfigError
from megarl.rewards.deadline import Deadline, TookTooLong
from megarl.types import Rollout

RewardFunction = Callable[[Rollout], float]
"""Looks at a finished rollout and returns a number of at most `LARGEST`; a bool counts as 0 or 1. It is given a copy of
what could be changed, without the engine's records of routing and of what could have been sampled."""

Parts = tuple[float, dict[str, float]]
"""What is added to a rollout's reward, and the parts of it by name."""

LARGEST = 1e6
"""Beyond it fp32 can no longer tell advantages apart: squares that are summed have 24 bits."""
_OURS = Path(__file__).parents[1]


class RewardError(ConfigError):
    """A reward function that raised, took too long, or returned something else than a number."""


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
    called = (function, getattr(function, "func", None), type(function).__call__)  # a partial's, an object's
    for kind in called:
        if inspect.iscoroutinefunction(kind) or inspect.isasyncgenfunction(kind) or inspect.isgeneratorfunction(kind):
            raise ConfigError(f"{what} is a coroutine or a generator; it must return a number when it is called")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"{what} must take a Rollout and nothing else: {error}") from None
    except ValueError:  # of C, which does not say
        pass
    return function  # type: ignore[no-any-return]


def score(
    rollouts: Sequence[Rollout], functions: Mapping[str, RewardFunction], timeout: float = math.inf
) -> list[Rollout]:
    """New rollouts, in the same order: `reward_parts` holds each function's number by name, `reward` is their sum.

    timeout: seconds of one call. A rollout that was aborted is shown to no function, its reward is 0 without parts.
    Raises RewardError, naming the function and the sample, when a function raises, takes too long or returns something
    else than a number of at most `LARGEST`.
    """
    deadline = Deadline(timeout) if functions and math.isfinite(timeout) else None
    scored = []
    with deadline or nullcontext():
        for rollout in rollouts:
            if rollout.status == "aborted":
                scored.append(replace(rollout, reward=0.0, reward_parts={}))
                continue
            parts = {name: _call(name, function, rollout, deadline) for name, function in functions.items()}
            scored.append(replace(rollout, reward=math.fsum(parts.values()), reward_parts=parts))
    return scored


def _call(name: str, function: RewardFunction, rollout: Rollout, deadline: Deadline | None) -> float:
    about = f"reward function {name} on the sample {rollout.prompt.id!r}"
    shown = _unharmed(rollout)
    try:
        try:
            if deadline is not None:
                deadline.begin(about)
            value: Any = function(shown)
            number = number_of(value, about)
        finally:
            if deadline is not None:
                deadline.end()
    except (RewardError, KeyboardInterrupt):
        raise
    except TookTooLong:
        limit = 0.0 if deadline is None else deadline.seconds
        late = f"{about} took longer than reward.timeout={limit:g} s; make it faster or raise that"
        raise RewardError(late) from None
    except BaseException as error:  # noqa: B036  whatever the user's function raises, sys.exit too
        frames = traceback.extract_tb(error.__traceback__)
        place = Path(frames[-1].filename)
        if isinstance(error, SystemExit) and place.is_relative_to(_OURS) and place.parent != Path(__file__).parent:
            raise  # of a handler of signals, which came in the middle
        raise RewardError(f"{about} raised {forks.worded(error)} ({place}:{frames[-1].lineno})") from error
    return number


def number_of(value: Any, about: str) -> float:
    """A number that a reward may be. Raises RewardError, which begins with `about`, for what is none."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a scalar of numpy or torch
    if not isinstance(value, bool | int | float):
        try:
            shown = repr(str(value)[:80])
        except Exception:  # its __str__ is a user's, too
            shown = "which cannot be shown"
        raise RewardError(f"{about} returned a {type(value).__name__}, {shown}; it must return a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise RewardError(f"{about} returned {value}; it must return a finite number")
    if abs(value) > LARGEST:
        size = f"{value:g}" if isinstance(value, float) or value.bit_length() < 1000 else "a number of many digits"
        raise RewardError(
            f"{about} returned {size}; beyond {LARGEST:g} the advantages of all others drown in fp32: scale it"
        )
    return float(value)


def _unharmed(rollout: Rollout) -> Rollout:
    """The rollout with copies of all that a function could change in place."""
    prompt = rollout.prompt
    own = replace(
        prompt,
        messages=_copied(prompt.messages),
        ground_truth=_copied(prompt.ground_truth),
        extra=_copied(prompt.extra),
    )
    turns = tuple(map(replace, rollout.turns))  # a turn makes its arrays read-only, which pickling undoes
    told = replace(rollout, prompt=own, turns=turns, messages=_copied(rollout.messages), reward_parts={})
    return replace(told, routing=None, support=None)


def _copied(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_copied(item) for item in value])
    return copy.deepcopy(value)
