"""Result of a row, the table and the report of all results, and the exit status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from rich import box
from rich.table import Table

State = Literal["passed", "failed", "not run", "not here"]
NOTHING_TRIED = 3
"""Exit status if no row could be tried, as on a machine without a GPU. 0: each row that could be tried passed; 1: one
failed; 2: wrong arguments."""


@dataclass(frozen=True)
class CheckResult:
    """`figures`: measured values, by name with their unit."""

    state: State
    text: str
    figures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def make_result(faults: list[str], text: str, figures: Mapping[str, float] | None = None) -> CheckResult:
    """Return a failed result if there are faults, otherwise a passed one."""
    return CheckResult("failed" if faults else "passed", "; ".join(faults) or text, figures or {})


def status(results: Mapping[str, CheckResult]) -> int:
    states = {result.state for result in results.values()}
    return 1 if "failed" in states else 0 if "passed" in states else NOTHING_TRIED


def table(results: Mapping[str, CheckResult], titles: Mapping[str, str]) -> Table:
    result_table = Table(box=box.SIMPLE_HEAD)
    for name in ("row", "what", "state", "s", "found"):
        result_table.add_column(
            name, justify="right" if name == "s" else "left", overflow="fold", no_wrap=name == "state"
        )
    for name, result in results.items():
        result_table.add_row(name, titles[name], result.state, f"{result.seconds:.0f}", result.text)
    return result_table


def report(results: Mapping[str, CheckResult], titles: Mapping[str, str], machine: str) -> str:
    """Return the results as a Markdown table, for `docs/what_has_run.md`."""
    lines = [
        f"`tools/gpu_check.py`, {date.today()}: {machine}",
        "",
        "| row | what | state | s | found |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        figures = "".join(f"; {figure}: {value:.4g}" for figure, value in result.figures.items())
        text = f"{result.text}{figures}".replace("|", "\\|")
        lines.append(f"| `{name}` | {titles[name]} | {result.state} | {result.seconds:.0f} | {text} |")
    return "\n".join(lines) + "\n"
