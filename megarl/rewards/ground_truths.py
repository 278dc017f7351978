"""Check ground truths before anything starts, so that a reward function never meets one that it cannot use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megarl.config import Config, ConfigError
from megarl.data.datasets import iter_prompts
from megarl.rewards.functions import load_functions
from megarl.types import Prompt

CHECK_BUDGET_S = 20.0
"""Seconds spent on one file. Later rows are checked when they are used."""
_NAMED = 3
_MAX_BAD_FRACTION = 0.5
"""A file with a larger fraction of unusable rows belongs to another function, rather than having a few bad rows."""

Check = Callable[[Prompt], Any]
"""Raises ValueError for a prompt whose ground truth cannot be used."""
F = TypeVar("F", bound=Callable[..., Any])


def with_prompt_check(check: Check) -> Callable[[F], F]:
    """Decorate a reward function with the check of its prompts, as attribute `check`."""

    def decorate(function: F) -> F:
        setattr(function, "check", check)  # noqa: B010  functions have no such attribute by themselves
        return function

    return decorate


def check_truth_file(config: Config, path: str) -> list[str]:
    """Run `check_truths` on a file of prompts with the run's reward functions."""
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
    rejected: dict[str, list[str]] = {name: [] for name in checks}
    counts = dict.fromkeys(checks, 0)
    num_checked, deadline, messages = 0, time.monotonic() + seconds, []
    for where, prompt in rows:
        for name, check in checks.items():
            try:
                check(prompt)
            except ValueError as error:
                counts[name] += 1
                if len(rejected[name]) < _NAMED:
                    rejected[name].append(f"{where}: {' '.join(str(error).split())[:300]}")
        num_checked += 1
        if time.monotonic() >= deadline:
            messages.append(f"{path}: the first {num_checked} rows' ground truths were looked at, in {seconds:g} s")
            break
    for name, examples in rejected.items():
        if examples:
            line = (
                f"{counts[name]} of {num_checked} rows have no ground truth that {name} can use; {'; '.join(examples)}"
            )
            if counts[name] > _MAX_BAD_FRACTION * num_checked:
                raise ConfigError(f"{path}: {line}")
            messages.append(f"{path}: {line}")
    return messages
