"""Load reward functions by name and check their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megarl.config import ConfigError, plugins
from megarl.types import Rollout

RewardFunction = Callable[[Rollout], Any]
"""Takes a finished rollout and returns a number of magnitude at most `MAX_REWARD` (a bool counts as 0 or 1), or a
`Reward`. A coroutine function is awaited. The function receives a copy of mutable fields, without the engine's routing
and sampling-mask records."""


def load_functions(names: Sequence[str]) -> dict[str, RewardFunction]:
    """Load the functions of `reward.functions`, each `module:name`, by name (by `module:name` where a name is taken).

    Raises ConfigError for a module that cannot be imported, a missing name, an object that is not a function of a
    rollout, and a duplicate entry.
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
    """Return the function if it can be called with a rollout and may return a number; else raise ConfigError."""
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
    except ValueError:  # a C function without a signature
        pass
    return function  # type: ignore[no-any-return]
