"""What a benchmark prints: tables for people, and one JSON object for programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine, list_versions, read_load
from benchmarks.measure import Ratio, Stopwatch
from megarl.config.command_line import check_writable_file

STDOUT = Path("-")

Row = Mapping[str, Any]
"""A row of a table by column: text, numbers, Ratio. Lists and dicts are not printed, and are in the JSON object."""


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="a file for one JSON object with machine, versions and rows; alone, it is printed instead of the tables",
    )


class Report:
    """The output of one command, between `start` and `close`. If JSON goes to stdout, all else goes to stderr."""

    def __init__(self, command: str, options: argparse.Namespace) -> None:
        self._file: Path | None = options.json
        if self._file != STDOUT:
            check_writable_file(self._file, "--json")
        shown = {name: value for name, value in vars(options).items() if name != "json"}
        self._result: dict[str, Any] = {"command": command, "options": shown, "rows": [], "notes": []}
        stream = sys.stderr if self._file == STDOUT else sys.stdout
        self._console = Console(file=stream, width=None if stream.isatty() else 160, markup=False, highlight=False)
        self._watch = Stopwatch()

    def start(self, **versions: str) -> None:
        """Print the machine, the versions of packages and the load. versions: of packages in other environments."""
        machine, packages, load = describe_machine(), list_versions() | versions, read_load()
        self._result |= {"machine": machine, "versions": packages, "load": {"before": load}}
        self.progress(
            f"machine: {machine['cpu']}, {machine['cores']} of {machine['cores_of_machine']} cores, "
            f"{machine['memory_gb']} GB, GPU: {machine['gpu']}, Linux {machine['kernel']}"
        )
        self.progress("versions: " + ", ".join(f"{name} {version}" for name, version in packages.items()))
        self.progress(f"load before: {load}")
        self._watch.__enter__()

    def progress(self, text: str) -> None:
        """Print a line that is not part of the result."""
        self._console.print(text)

    def note(self, text: str) -> None:
        """Print a line that belongs to the result."""
        self._console.print(text)
        self._result["notes"].append(text)

    def table(self, title: str, rows: Sequence[Row], transposed: bool = False) -> None:
        """Print a table, and add its rows to the result. transposed: print a row as a column, under its first value."""
        self._result["rows"] += [{"table": title, **row} for row in rows]
        names = list({name: 0 for row in rows for name, value in row.items() if not isinstance(value, (list, dict))})
        lines = [[format_value(name, row.get(name)) for name in names] for row in rows]
        if transposed:
            names, *lines = [list(line) for line in zip(names, *lines, strict=True)]
        self._console.print(f"\n{title}")
        table = Table(box=box.SIMPLE_HEAD)
        for number, name in enumerate(names):
            table.add_column(name, justify="right" if number else "left")
        for line in lines:
            table.add_row(*line)
        self._console.print(table, end="")

    def close(self) -> None:
        """Print load and time, and write the JSON object."""
        self._watch.__exit__()
        load = self._result["load"]
        load["after"] = read_load()
        self._result |= {"seconds": self._watch.seconds, "processor_s": self._watch.processor_s}
        self.progress(
            f"load after: {load['after']}; the command took {self._watch.seconds:.1f} s, and "
            f"{self._watch.processor_s:.1f} processor seconds of all of its processes"
        )
        if self._file is not None:
            text = json.dumps(self._result, indent=1, default=encode)
            print(text) if self._file == STDOUT else self._file.write_text(text + "\n")


def encode(value: Any) -> Any:
    return asdict(value) if isinstance(value, Ratio) else str(value)


def format_value(column: str, value: Any) -> str:
    """Format a cell; a column whose name ends with % has shares of 1."""
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if column.endswith("%"):
        return f"{100 * value:.1f}"
    digits = next((digits for bound, digits in ((1000, 0), (100, 1), (10, 2)) if abs(value) >= bound), 3)
    return f"{value:,.{digits}f}" if abs(value) >= 0.0095 or not value else f"{value:.2g}"
