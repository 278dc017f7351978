"""Runs recipes and compares what comes of them with what they say they must reach: `expect` in their configuration.

    .venv/bin/python tools/check_recipes.py [CONFIG ...] [--quickstart runs/quickstart] [--out runs/checked]
                                            [section.key=value ...]

By default all of configs/ that expect something and need no more ranks than this machine has cores, or three. Those of
the quickstart's task are given the folder of launch/quickstart.sh. Ends with 1 where something was not reached. Runs
that are finished in --out are not taken again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import trials
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.command_line import Parser, ends_in_a_line
from megarl.config import ConfigError, load_config
from megarl.expected import expectations, reached


def small() -> list[Path]:
    """The configurations that expect something and fit this machine."""
    most = max(3, os.cpu_count() or 1)
    found = []
    for path in sorted((trials.ROOT / "configs").glob("*.yaml")):
        config = load_config(path)
        if config.expect and config.parallel.world_size <= most:
            found.append(path)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("configs", nargs="*", help="configurations, and overrides of all of them")
    parser.add_argument("--quickstart", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("runs/checked"))
    options = parser.parse_intermixed_args(arguments)
    overrides = [one for one in options.configs if "=" in one]
    paths = [Path(one) for one in options.configs if "=" not in one] or small()
    table, missed = Table("recipe", "figure", "expected", "found", "", box=box.SIMPLE_HEAD), 0
    for path in paths:
        config = load_config(path, overrides)
        expected = expectations(config)
        if not expected:
            raise ConfigError(f"{path} expects nothing: give it a section `expect`")
        of_task = config.model.path.startswith("runs/quickstart/sft/")
        own = trials.quickstart(options.quickstart.resolve()) if of_task else []
        metrics = trials.run(str(path.resolve()), [*own, *overrides], options.out.resolve() / path.stem)
        for name, (figure, good) in reached(expected, metrics).items():
            said = "not told" if figure is None else f"{figure:.4g}"
            table.add_row(path.stem, name, str(expected[name]), said, "" if good else "MISSED")
            missed += not good
    Console(width=120).print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(ends_in_a_line(main))
