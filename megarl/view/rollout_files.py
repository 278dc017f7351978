"""Tolerant readers of recorded rollouts: a damaged, missing or incompatible file costs its own content only.

The viewer shows whatever is there, whereas `megarl.observe.rollout_log` requires complete steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.observe.rollout_columns import COLUMNS_SINCE_FORMAT, FORMAT, SCHEMA
from megarl.observe.rollout_log import recorded_steps, step_folder

REQUIRED_COLUMNS = ("number", "group", "status", "reward", "turn_lengths", "turn_is_action")
"""Columns without which a file is skipped."""
READ_ERRORS = (pa.ArrowException, OSError, ValueError, LookupError, TypeError)
MAX_NOTES = 20


class Part(NamedTuple):
    path: Path
    file: pq.ParquetFile

    @property
    def names(self) -> set[str]:
        return set(self.file.schema_arrow.names)

    def read_metadata(self, name: str) -> int:
        """Return an integer from the file's metadata, -1 if missing."""
        value = (self.file.schema_arrow.metadata or {}).get(f"megarl.{name}".encode(), b"")
        return int(value) if value.isdigit() else -1


class Notes(list[str]):
    """Messages about problems, without duplicates and at most `MAX_NOTES`."""

    def add(self, text: str) -> None:
        if text in self:
            return
        if len(self) < MAX_NOTES:
            self.append(text)
        elif len(self) == MAX_NOTES:
            self.append("and further problems, which are not listed")


def list_steps(run_dir: Path, notes: Notes) -> list[int]:
    """Return the recorded steps, ascending. Adds a note if there are none."""
    try:
        steps = recorded_steps(run_dir)
    except OSError as error:
        notes.add(f"{run_dir / 'rollouts'} cannot be read: {error.strerror}")
        return []
    if not steps:
        notes.add(f"{run_dir} has no recorded rollouts: no step is done yet, or track.save_rollouts is off")
    return steps


def open_parts(run_dir: Path, step: int, notes: Notes) -> list[Part]:
    """Open the readable files of a step; note what is wrong with the others."""
    parts: list[Part] = []
    for path in sorted(step_folder(run_dir, step).glob("rank_*.parquet")):
        try:
            part = Part(path, pq.ParquetFile(path.absolute(), page_checksum_verification=True))
            missing = [name for name in REQUIRED_COLUMNS if name not in part.names]
            invalid = [name for name in part.names & set(SCHEMA.names) if not _fits(part, name)]
        except READ_ERRORS as error:
            notes.add(f"{path} is damaged, or not a file of recorded rollouts, and is excluded: {format_error(error)}")
            continue
        if missing or any(name in REQUIRED_COLUMNS for name in invalid):
            notes.add(
                f"{path} is not a file of recorded rollouts and is excluded: column {(missing + invalid)[0]!r} is "
                f"missing or invalid"
            )
            continue
        if (file_format := part.read_metadata("format")) != FORMAT and file_format + 1 not in COLUMNS_SINCE_FORMAT:
            notes.add(
                f"{path.parent.parent} has files of format {file_format}, and this program knows format {FORMAT}: only "
                f"their common columns are shown"
            )
        parts.append(part)
    if not parts:
        notes.add(f"{step_folder(run_dir, step)} has no file that can be read")
    elif (total := parts[0].read_metadata("total")) > (num_rows := sum(part.file.metadata.num_rows for part in parts)):
        notes.add(f"{step_folder(run_dir, step)} has {num_rows} of the {total} rollouts of its step: it is incomplete")
    return parts


def _fits(part: Part, name: str) -> bool:
    return bool(part.file.schema_arrow.field(name).type == SCHEMA.field(name).type)


def iter_groups(part: Part, columns: Sequence[str], notes: Notes) -> Iterator[tuple[int, pa.Table]]:
    """Yield (index, table) per row group, with those of `columns` that the file has. Notes damaged groups."""
    available = [name for name in columns if name in part.names]
    for group in range(part.file.num_row_groups):
        if (table := read_group(part, group, available, notes)) is not None:
            yield group, table


def read_group(part: Part, group: int, columns: Sequence[str], notes: Notes) -> pa.Table | None:
    try:
        return part.file.read_row_group(group, list(columns))
    except READ_ERRORS as error:
        rows = part.file.metadata.row_group(group).num_rows
        notes.add(f"{part.path}: {rows} rollouts are damaged and excluded: {format_error(error)}")
        return None


def flatten_lists(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated values of a column of n lists, and their [n + 1] offsets."""
    column = table.column(name).combine_chunks()
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=False)
    return values[offsets[0] : offsets[-1]], offsets - offsets[0]


def sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the [n] sums of n concatenated lists, given their [n + 1] `offsets`."""
    running = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    result: np.ndarray = running[offsets[1:]] - running[offsets[:-1]]
    return result


def format_error(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def cell(table: pa.Table, name: str, row: int) -> Any:
    """Return one value; None if the column is missing."""
    return table.column(name)[row].as_py() if name in table.column_names else None
