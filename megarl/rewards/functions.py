"""Reward functions: load them by name, and check their signatures and the ground truths that they will read."""

from __future__ import annotations

import inspect
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megarl.config import Config, ConfigError, plugins
from megarl.rewards.reward_adapters import adapt, find_prefix, split_prefix
from megarl.types import Prompt, Rollout

RewardFunction = Callable[[Rollout], Any]
"""Takes a finished rollout and returns a number of magnitude at most `MAX_REWARD` (a bool counts as 0 or 1), or a
`Reward`. A coroutine function is awaited. The function receives a copy of mutable fields, without the engine's routing
and sampling-mask records."""


def load_functions(names: Sequence[str]) -> dict[str, RewardFunction]:
    """Load the functions of `reward.functions`, by name (by the whole entry where a name is taken).

    An entry is `module:name`, with a prefix of `reward_adapters` for a function in the signature of another library.
    Raises ConfigError for a module that cannot be imported, a missing name, an object that is not a function of a
    rollout, an unknown prefix or a signature that does not match it, and a duplicate entry.
    """
    functions: dict[str, RewardFunction] = {}
    for name in names:
        if list(names).count(name) > 1:
            raise ConfigError(f"reward.functions: {name} is listed twice")
        prefix, spec = split_prefix(name)
        target, what = plugins.load(spec, "reward.functions"), f"reward.functions: {name}"
        if prefix:
            function = adapt(prefix, check_callable(target, what), what)
        else:
            function = check_function(target, what)
        attribute = spec.partition(":")[2]
        functions[attribute if attribute not in functions else name] = function
    return functions


def check_function(function: Any, what: str) -> RewardFunction:
    """Return the function if it can be called with a rollout and may return a number; else raise ConfigError."""
    check_callable(function, what)
    if prefix := find_prefix(function):
        raise ConfigError(
            f"{what} must take a Rollout and nothing else; its parameters are those of a function for {prefix}: write "
            f"{prefix}:module:name"
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"{what} must take a Rollout and nothing else: {error}") from None
    except ValueError:  # a C function without a signature
        pass
    return function  # type: ignore[no-any-return]


def check_callable(function: Any, what: str) -> Callable[..., Any]:
    """Return the function if a call may return a number; else raise ConfigError."""
    if not callable(function):
        raise ConfigError(f"{what} is a {type(function).__name__}, not a function of a Rollout")
    if isinstance(function, type):
        raise ConfigError(f"{what} is a class, whose call returns an object, not a number; name a function")
    if plugins.is_generator(function):
        raise ConfigError(f"{what} is a generator; it must return a number when it is called")
    return function  # type: ignore[no-any-return]


CHECK_BUDGET_S = 20.0
"""Seconds spent on one file. Later rows are checked when they are used."""
_NAMED = 3
_MAX_BAD_FRACTION = 0.5
"""A file with a larger fraction of unusable rows belongs to another function, rather than having a few bad rows."""

F = TypeVar("F", bound=Callable[..., Any])  # a reward function


def with_prompt_check(check: Callable[[Prompt], Any]) -> Callable[[F], F]:
    """Decorate a reward function with its attribute `check`, which raises ValueError for an unusable ground truth."""

    def decorate(function: F) -> F:
        setattr(function, "check", check)  # noqa: B010  functions have no such attribute by themselves
        return function

    return decorate


def check_truth_file(config: Config, path: str) -> list[str]:
    """Run `check_truths` on a file of prompts with the run's reward functions."""
    from megarl.data.datasets import iter_prompts  # not needed in worker processes

    rows = iter_prompts(Path(path), config.data.prompt_key, config.data.label_key)
    return check_truths(load_functions(config.reward.functions), rows, path)


def check_truths(
    functions: Mapping[str, Any], rows: Iterable[tuple[str, Prompt]], path: str, seconds: float = CHECK_BUDGET_S
) -> list[str]:
    """Return one message per function that rejects rows of a file, naming the first rows.

    functions: those with an attribute `check` take part. rows: (location, prompt). Raises ConfigError if a function
    rejects more than half of the rows checked.
    """
    checks = {name: check for name, function in functions.items() if (check := getattr(function, "check", None))}
    if not checks:
        return []
    counts, examples = Counter[str](), defaultdict[str, list[str]](list)
    num_checked, deadline, messages = 0, time.monotonic() + seconds, []
    for location, prompt in rows:
        for name, check in checks.items():
            try:
                check(prompt)
            except ValueError as error:
                counts[name] += 1
                if counts[name] <= _NAMED:
                    examples[name].append(f"{location}: {' '.join(str(error).split())[:300]}")
        num_checked += 1
        if time.monotonic() >= deadline:
            messages.append(f"{path}: the first {num_checked} rows' ground truths were checked in {seconds:g} s")
            break
    for name, count in counts.items():
        line = f"{path}: {count} of {num_checked} rows have no ground truth that {name} can use; "
        line += "; ".join(examples[name])
        if count > _MAX_BAD_FRACTION * num_checked:
            raise ConfigError(line)
        messages.append(line)
    return messages
