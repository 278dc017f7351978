"""Load a fork's extensions by `module:name`, or by the name of an entry point that its package declares.

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
    """Import and return the object `module:name`.

    Raises ConfigError, prefixed with the key, for a malformed spec, a module that cannot be imported, or a missing
    name.
    """
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute) or module_name.startswith("."):
        raise ConfigError(f"{key}: {spec!r} is not of the form module:name")
    try:
        module = importlib.import_module(module_name)
        target = getattr(module, attribute, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: B036  anything that the fork's module raises, even sys.exit
        raise ConfigError(f"{key}: cannot import {module_name} of {spec!r}: {format_error(error)}") from error
    if target is None:
        callables = [  # its own, without what it imports
            name
            for name, value in vars(module).items()
            if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == module_name
        ]
        available = ", ".join(callables) or "no function or class"
        raise ConfigError(f"{key}: {module_name} has no {attribute!r}; it has {available}")
    return target


@cache
def list_entry_points(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group in all installed packages, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


def is_async(function: Any) -> bool:
    """True if calling `function` returns a coroutine."""
    return any(map(inspect.iscoroutinefunction, call_targets(function)))


def is_generator(function: Any) -> bool:
    """True if calling `function` returns a generator or an async generator."""
    kinds = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(kind(target) for kind in kinds for target in call_targets(function))


def call_targets(function: Any) -> tuple[Any, ...]:
    """Return the functions that a call may execute, also for partials and callable objects."""
    return function, getattr(function, "func", None), type(function).__call__


def format_error(error: BaseException, named: bool = True) -> str:
    """Format an exception of user code as one line; `named` prefixes its class, which stands alone without a text."""
    kind = type(error).__name__
    try:
        text = " ".join(str(error).split())[:2000]
    except Exception:  # __str__ is user code
        text = ""
    return f"{kind}: {text}" if text and named else text or kind
