"""The result of a row, and the table of all rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from faults.rows import ROWS


@dataclass(frozen=True)
class RowResult:
    """ok: whether the row is as expected. detect, recover: seconds from the fault to its first trace that a user can
    see, and to where the run continued after it; None if there is nothing to measure. lost: samples generated or
    recorded for the run and never trained on; None if it has none."""

    ok: bool
    text: str
    detect: float | None = None
    recover: float | None = None
    lost: int | None = None


@dataclass
class Findings:
    """Facts about one row, each an expectation and whether it holds; the row is as expected if all hold."""

    facts: list[tuple[bool, str]]

    def __init__(self) -> None:
        self.facts = []

    def add(self, ok: bool, yes: str, no: str = "") -> bool:
        """Add a fact. no: text if it does not hold; by default, NOT and the positive text."""
        self.facts.append((ok, yes if ok else no or f"NOT: {yes}"))
        return ok

    def result(self, detect: float | None = None, recover: float | None = None, lost: int | None = None) -> RowResult:
        return RowResult(
            all(ok for ok, _ in self.facts), "; ".join(text for _, text in self.facts), detect, recover, lost
        )


def table(results: Mapping[int, RowResult]) -> Table:
    rendered = Table(box=box.SIMPLE, padding=(0, 1), expand=True)
    for name, ratio in (("row", None), ("injected", 3), ("expected", 3), ("seen", 8), ("ok", None)):
        rendered.add_column(name, ratio=ratio)
    for name in ("detect s", "recover s", "lost"):
        rendered.add_column(name, justify="right")
    for number, result in sorted(results.items()):
        row = ROWS[number]
        figures = (
            "" if figure is None else f"{figure:.1f}" if isinstance(figure, float) else str(figure)
            for figure in (result.detect, result.recover, result.lost)
        )
        rendered.add_row(
            str(number),
            row.injected,
            row.expected,
            result.text,
            "yes" if result.ok else "NO",
            *figures,
            end_section=True,
        )
    return rendered


def total(results: Mapping[int, RowResult]) -> str:
    """Return `29 of 30`, counting the rows that were tried."""
    return f"{sum(result.ok for result in results.values())} of {len(results)} rows are as expected"


def as_json(results: Mapping[int, RowResult]) -> dict[str, Any]:
    rows = {
        str(number): {"injected": ROWS[number].injected, "expected": ROWS[number].expected, **asdict(result)}
        for number, result in sorted(results.items())
    }
    return {"rows": rows, "ok": sum(result.ok for result in results.values()), "of": len(results)}
