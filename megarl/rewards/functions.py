"""Reward functions: found by name, and what they return made sense of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megarl.config import ConfigError, plugins
from megarl.types import Rollout

RewardFunction = Callable[[Rollout], Any]
"""Looks at a finished rollout and returns a number of at most `LARGEST`, where a bool counts as 0 or 1, or a `Reward`;
a coroutine function is awaited. It is given a copy of what could be changed, without the engine's records of routing
and of what could have been sampled."""


def load_functions(names: Sequence[str]) -> dict[str, RewardFunction]:
    """The functions of `reward.functions`, each `module:name`, by name (by module:name where a name is taken).

    Raises ConfigError for a module that cannot be imported, a name that it lacks, what is no function of a rollout, and
    what is listed twice.
    """
    functions: dict[str, RewardFunction] = {}
    for name in names:
        if list(names).count(name) > 1:
            raise ConfigError(f"reward.functions: {name} is listed twice")
        function, attribute = plugins.load(name, "reward.functions"), name.partition(":")[2]
        functions[attribute if attribute not in functions else name] = check_function(
            function, f"reward.functions: {name}"
        )
    return functions


def check_function(function: Any, what: str) -> RewardFunction:
    """The function, if it can be called with a rollout and may return a number; else ConfigError."""
    if not callable(function):
        raise ConfigError(f"{what} is a {type(function).__name__}, not a function of a Rollout")
    if isinstance(function, type):
        raise ConfigError(f"{what} is a class, and calling it gives an object, not a number; name a function")
    if plugins.is_generator(function):
        raise ConfigError(f"{what} is a generator; it must return a number when it is called")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"{what} must take a Rollout and nothing else: {error}") from None
    except ValueError:  # of C, which does not say
        pass
    return function  # type: ignore[no-any-return]
