"""A user mistake and its required outcome: one error line, exit code 2, nothing written, no process left.

The modules beside this one are tables of cases, one per area; `test_bad_input.py` runs them all. Add a case as a
line in the table of its area, or add a module with a list CASES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAM = "megarl.train"


def no_changes(folder: Path) -> None:
    """The default preparation: leave the folder as it is."""


@dataclass(frozen=True)
class Case:
    """FOLDER in `overrides`, `command` and `expected` is the copy of the base folder: model/, train.jsonl,
    eval.jsonl, sft.jsonl, config.yaml. Modules in it can be imported."""

    name: str
    expected: tuple[str, ...]
    """Parts of the error line: what is wrong, by name, and the remedy."""
    overrides: tuple[str, ...] = ()
    """Overrides of the configuration."""
    prepare: Callable[[Path], None] = no_changes
    """Changes the copy before the run."""
    command: tuple[str, ...] = (PROGRAM,)
    """PROGRAM, which gets the configuration and `overrides`; or a tool's file with its command line, or `-m` and a
    module, or `bash` and a script."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""
