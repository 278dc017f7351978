"""A mistake that a user can make, and what must come of it: one line, exit code 2, nothing written, nothing running.

The modules beside this one are tables of such cases, one for each area; `test_bad_input.py` tries them all. A new one
is a line in the table of its area, or a module with a list CASES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAM = "megarl.train"


def nothing(folder: Path) -> None:
    """What most cases have to prepare."""


@dataclass(frozen=True)
class Case:
    """In `given`, `command` and `says`, FOLDER stands for the case's own copy of the material: model/, train.jsonl,
    eval.jsonl, sft.jsonl, config.yaml. Modules in it can be imported."""

    name: str
    says: tuple[str, ...]
    """Parts of the one line: what is wrong, by its name, and the remedy."""
    given: tuple[str, ...] = ()
    """Overrides of the configuration."""
    prepare: Callable[[Path], None] = nothing
    """Spoils the copy."""
    command: tuple[str, ...] = (PROGRAM,)
    """PROGRAM, which is given the configuration and `given`; or a tool's file with its whole command line, or `-m` and
    a module, or `bash` and a script."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables besides those of this process."""
