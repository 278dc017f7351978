"""Tolerant readers of recorded rollouts: a damaged, missing or incompatible file costs its own content only.

The viewer shows whatever is there, whereas `megarl.observe.rollout_log` requires complete steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from megarl.observe.rollout_columns import COLUMNS_SINCE_FORMAT, FORMAT, SCHEMA
from megarl.observe.rollout_log import Part, list_parts, recorded_steps, step_folder
from megarl.utils.text import one_line

REQUIRED_COLUMNS = ("number", "group", "status", "reward", "turn_lengths", "turn_is_action")
"""Columns without which a file is skipped."""
READ_ERRORS = (pa.ArrowException, OSError, ValueError, LookupError, TypeError)
MAX_NOTES = 20


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
    for path in list_parts(run_dir, step):
        try:
            part = Part.open(path)
            types = {field.name: field.type for field in part.file.schema_arrow}
            invalid = [name for name in REQUIRED_COLUMNS if types.get(name) != SCHEMA.field(name).type]
        except READ_ERRORS as error:
            reason = one_line(error, 200)
            notes.add(f"{path} is damaged, or not a file of recorded rollouts, and is excluded: {reason}")
            continue
        if invalid:
            notes.add(
                f"{path} is not a file of recorded rollouts and is excluded: column {invalid[0]!r} is missing or "
                "invalid"
            )
            continue
        file_format = _read_integer(part, "format")
        if file_format != FORMAT and file_format + 1 not in COLUMNS_SINCE_FORMAT:
            notes.add(
                f"{path.parent.parent} has files of format {file_format}, and this program knows format {FORMAT}: only "
                f"their common columns are shown"
            )
        parts.append(part)
    if not parts:
        notes.add(f"{step_folder(run_dir, step)} has no file that can be read")
        return parts
    total, num_rows = _read_integer(parts[0], "total"), sum(part.file.metadata.num_rows for part in parts)
    if total > num_rows:
        notes.add(f"{step_folder(run_dir, step)} has {num_rows} of the {total} rollouts of its step: it is incomplete")
    return parts


def _read_integer(part: Part, name: str) -> int:
    text = part.read_metadata(name)
    return int(text) if text.isdecimal() else -1


def iter_groups(part: Part, columns: Sequence[str], notes: Notes) -> Iterator[tuple[int, pa.Table]]:
    """Yield (index, table) per row group, with those of `columns` that the file has. Notes damaged groups."""
    for group in range(part.file.num_row_groups):
        if (table := read_group(part, group, columns, notes)) is not None:
            yield group, table


def read_group(part: Part, group: int, columns: Sequence[str], notes: Notes) -> pa.Table | None:
    """Return those of `columns` that the file has; None, with a note, if they are damaged."""
    try:
        return part.file.read_row_group(group, [name for name in columns if name in part.names])
    except READ_ERRORS as error:
        rows = part.file.metadata.row_group(group).num_rows
        notes.add(f"{part.path}: {rows} rollouts are damaged and excluded: {one_line(error, 200)}")
        return None


def flatten_lists(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated values of a column of n lists, and their [n + 1] offsets."""
    column = table.column(name).combine_chunks()
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=False)
    return values[offsets[0] : offsets[-1]], offsets - offsets[0]
