"""Ground truths, looked at before anything starts: what no reward function could compare an answer with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megarl.config import Config, ConfigError
from megarl.data.prompt_data import iter_prompts
from megarl.rewards.functions import load_functions
from megarl.types import Prompt

CHECK_BUDGET_S = 20.0
"""Of one file so long is looked at. What is behind is met when its turn comes."""
_NAMED = 3
_MAX_BAD_FRACTION = 0.5
"""Share of the rows of which a file is another function's, and none that has a few bad rows."""

Check = Callable[[Prompt], Any]
"""Raises ValueError where a prompt's ground truth cannot be compared with anything."""
F = TypeVar("F", bound=Callable[..., Any])


def with_prompt_check(check: Check) -> Callable[[F], F]:
    """Of a reward function: by what its prompts can be looked at beforehand, which is its attribute `check`."""

    def give(function: F) -> F:
        setattr(function, "check", check)  # noqa: B010  functions have no such attribute by themselves
        return function

    return give


def check_truth_file(config: Config, path: str) -> list[str]:
    """`check_truths` of a file of prompts, by the run's own functions."""
    rows = iter_prompts(Path(path), config.data.prompt_key, config.data.label_key)
    return check_truths(load_functions(config.reward.functions), rows, path)


def check_truths(
    functions: Mapping[str, Any], rows: Iterable[tuple[str, Prompt]], path: str, seconds: float = CHECK_BUDGET_S
) -> list[str]:
    """What is to be said of a file, in a line for each function that has found something, the first rows by name.

    functions: those with an attribute `check` look. rows: (where it stands, prompt). Raises ConfigError where more than
    half of what was looked at is of no use to a function.
    """
    checks = {name: check for name, function in functions.items() if (check := getattr(function, "check", None))}
    if not checks:
        return []
    wrong: dict[str, list[str]] = {name: [] for name in checks}
    counts = dict.fromkeys(checks, 0)
    looked, end, said = 0, time.monotonic() + seconds, []
    for where, prompt in rows:
        for name, check in checks.items():
            try:
                check(prompt)
            except ValueError as error:
                counts[name] += 1
                if len(wrong[name]) < _NAMED:
                    wrong[name].append(f"{where}: {' '.join(str(error).split())[:300]}")
        looked += 1
        if time.monotonic() >= end:
            said.append(f"{path}: the first {looked} rows' ground truths were looked at, in {seconds:g} s")
            break
    for name, found in wrong.items():
        if found:
            line = f"{counts[name]} of {looked} rows have no ground truth that {name} can use; {'; '.join(found)}"
            if counts[name] > _MAX_BAD_FRACTION * looked:
                raise ConfigError(f"{path}: {line}")
            said.append(f"{path}: {line}")
    return said
