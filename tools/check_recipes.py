"""Run recipes and compare their results with the targets in their configuration (`expect`).

    .venv/bin/python tools/check_recipes.py [CONFIG ...] [--quickstart runs/quickstart] [--out runs/checked]
                                            [section.key=value ...]

By default runs the recipes of the quickstart's task, which are small: they read the folder of launch/quickstart.sh, and
take some minutes each on two cores. Name others to run them; they need the weights and the data that their first lines
describe. Exits with 1 if a target is missed. Runs that are finished in --out are not repeated.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import trials
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config import Config, ConfigError, load_config
from megarl.config.command_line import Parser, parse_path_text, run_cli
from megarl.dry_run.validation import check_expectations, parse_expectations

TASK = "runs/quickstart/"
"""Folder of launch/quickstart.sh's output, as recipes of the quickstart's task name it."""


def find_small_recipes() -> list[Path]:
    """Return the configurations of the quickstart's task that have targets and fit this machine."""
    max_ranks = max(3, os.cpu_count() or 1)
    configs = []
    for path in sorted((trials.ROOT / "configs").glob("*.yaml")):
        config = load_config(path)
        if config.expect and config.model.path.startswith(TASK) and config.parallel.world_size <= max_ranks:
            configs.append(path)
    return configs


def quickstart_overrides(config: Config, folder: Path) -> list[str]:
    """Return overrides that make a recipe read this folder instead of runs/quickstart; none for a recipe that does not
    name it. Raises ConfigError if the folder lacks a file that it reads."""
    paths_by_key = {"model.path": (config.model.path,), "data.train": config.data.train, "data.eval": config.data.eval}
    overrides = []
    for key, paths in paths_by_key.items():
        if not any(path.startswith(TASK) for path in paths):
            continue
        local_paths = [folder / path.removeprefix(TASK) if path.startswith(TASK) else Path(path) for path in paths]
        for path in local_paths:
            if not path.exists():
                raise ConfigError(
                    f"{path} is not there: call launch/quickstart.sh first, or give the folder it has made with "
                    "--quickstart"
                )
        value = str(local_paths[0]) if len(local_paths) == 1 else json.dumps([str(path) for path in local_paths])
        overrides.append(f"{key}={value}")
    return overrides


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("configs", nargs="*", help="configurations, and overrides of all of them")
    parser.add_argument("--quickstart", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("runs/checked"))
    options = parser.parse_intermixed_args(arguments)
    overrides = [argument for argument in options.configs if "=" in argument]
    files = [
        Path(parse_path_text(argument)) for argument in options.configs if "=" not in argument
    ] or find_small_recipes()
    table, missed = Table("recipe", "figure", "expected", "found", "", box=box.SIMPLE_HEAD), 0
    for file in files:
        config = load_config(file, overrides)
        expected = parse_expectations(config)
        if not expected:
            raise ConfigError(f"{file} expects nothing: give it a section `expect`")
        task_overrides = quickstart_overrides(config, options.quickstart.resolve())
        metrics = trials.run(str(file.resolve()), [*task_overrides, *overrides], options.out.resolve() / file.stem)
        for name, (figure, is_met) in check_expectations(expected, metrics).items():
            value = "not told" if figure is None else f"{figure:.4g}"
            table.add_row(file.stem, name, str(expected[name]), value, "" if is_met else "MISSED")
            missed += not is_met
    Console(width=120).print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
