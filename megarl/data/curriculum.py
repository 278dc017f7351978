"""Curriculum: sort items by the numbers of a column, such as difficulty."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import ConfigError
from megarl.data.table import is_parquet, open_parquet, to_dicts

NESTED_COLUMNS = ("extra_info", "metadata", "extra")
"""Columns whose fields count as columns."""


class OrderKeys:
    """Collects the numbers of a column row by row; without a column it collects nothing."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._values = array("d")

    def add(self, row: Mapping[str, Any], location: str) -> None:
        """Add a row. Raises ConfigError for a value that is no number; missing and null values are unknown."""
        if self._column:
            self._values.append(read_key(row, self._column, location))

    def to_array(self) -> np.ndarray | None:
        """Return [rows] float64, NaN if unknown; None without a column."""
        return np.array(self._values, dtype=np.float64) if self._column else None


def check_has_keys(keys: np.ndarray | None, column: str, files: Sequence[str]) -> None:
    """Raise ConfigError if no row of any file has a number in the column."""
    if keys is not None and np.isnan(keys).all():
        raise ConfigError(
            f"data.order={column}: no row of {', '.join(files)} has a number in that column, or in a field of "
            f"that name in {', '.join(NESTED_COLUMNS)}; set it to one that there is, or to nothing"
        )


def read_key(row: Mapping[str, Any], column: str, location: str) -> float:
    """Return the number in a column of a row, NaN if there is none. Raises ConfigError for other values."""
    value = row.get(column)
    for fields in (row.get(name) for name in NESTED_COLUMNS if value is None):
        value = fields.get(column) if value is None and isinstance(fields, dict) else value
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"{location}: {column!r} is {str(value)[:80]!r}, which is no number; data.order={column} puts rows in the "
            "order of numbers, so write one, or null where it is unknown"
        )
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{location}: {column!r} is beyond what a float64 holds; write a smaller number") from None


def check_no_nan(file: Path, column: str) -> None:
    """Raise ConfigError, naming the row, if the column holds NaN, which `read_rows` returns as null.

    NaN may be a missing number or a failed division.
    """
    if is_parquet(file):
        with open_parquet(file) as table:
            names = [name for name in (column, *NESTED_COLUMNS) if name in table.schema_arrow.names]
            rows: Iterator[Any] = (
                (f"{file}, row {number}", row)
                for number, row in enumerate(
                    row for batch in table.iter_batches(columns=names, use_threads=False) for row in to_dicts(batch)
                )
            )
            _check_no_nan(rows, column)
        return
    with file.open("rb") as lines:
        _check_no_nan(
            ((f"{file}:{number}", json.loads(line)) for number, line in enumerate(lines, 1) if b"NaN" in line), column
        )


def _check_no_nan(rows: Iterable[tuple[str, dict[str, Any]]], column: str) -> None:
    for location, row in rows:
        for fields in (row, *(row.get(name) for name in NESTED_COLUMNS)):
            value = fields.get(column) if isinstance(fields, dict) else None
            if isinstance(value, float) and math.isnan(value):
                raise ConfigError(
                    f"{location}: {column!r} is NaN, by which data.order={column} cannot put rows in order; write a "
                    "number, or null where it is unknown"
                )


def sort_by_key(order: Sequence[int], keys: np.ndarray) -> list[int]:
    """Sort the items with known keys among the positions that they occupy in `order`. Stable.

    Items with unknown keys keep their positions.
    """
    result = np.asarray(order, dtype=np.int64).copy()
    positions = np.flatnonzero(~np.isnan(keys[result]))
    items = result[positions]
    result[positions] = items[np.argsort(keys[items], kind="stable")]
    order_list: list[int] = result.tolist()
    return order_list
