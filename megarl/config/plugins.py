"""What a fork adds in packages of its own: found by `module:name`, or by the name of an entry point that it declares.

    [project.entry-points."megarl.controllers"]
    dapo = "lab.dapo:DAPOController"

The groups are megarl.controllers, megarl.workers and megarl.families.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from megarl.config.strict import ConfigError


def load(spec: str, key: str) -> Any:
    """What `module:name` stands for. Raises ConfigError, which begins with the key, for what is of another form, a
    module that cannot be imported, and a name that it lacks."""
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute) or module_name.startswith("."):
        raise ConfigError(f"{key}: {spec!r} is not of the form module:name")
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, attribute, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: B036  whatever the fork's module raises, sys.exit too
        raise ConfigError(f"{key}: cannot import {module_name} of {spec!r}: {format_error(error)}") from error
    if found is None:
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigError(f"{key}: {module_name} has no {attribute!r}; it has {', '.join(known) or 'no function'}")
    return found


@cache
def list_entry_points(group: str) -> dict[str, EntryPoint]:
    """What the packages that are installed here declare in a group, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


def is_async(function: Any) -> bool:
    """Whether what a call of it returns is to be awaited."""
    return any(map(inspect.iscoroutinefunction, call_targets(function)))


def is_generator(function: Any) -> bool:
    """Whether a call of it returns a generator, of coroutines or not."""
    kinds = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(kind(one) for kind in kinds for one in call_targets(function))


def call_targets(function: Any) -> tuple[Any, ...]:
    """What a call of it comes down to, where that is a partial or an object."""
    return function, getattr(function, "func", None), type(function).__call__


def format_error(error: BaseException) -> str:
    """An error of somebody else's code in one line."""
    try:
        text = " ".join(str(error).split())[:1000]
    except Exception:  # its __str__ is a user's, too
        text = ""
    return f"{type(error).__name__}: {text}"
