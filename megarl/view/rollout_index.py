"""Index of a run: one row of scalars per rollout, for the table to show, sort and filter without tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.observe.rollout_log import step_folder
from megarl.types import STATUSES
from megarl.utils import exact_json
from megarl.view.column_codec import pack
from megarl.view.rollout_files import (
    READ_ERRORS,
    Notes,
    flatten_lists,
    format_error,
    iter_groups,
    list_steps,
    open_parts,
    sums,
)

_READ_COLUMNS: tuple[str, ...] = (
    "number",
    "group",
    "status",
    "reward",
    "unscored",
    "advantage",
    "logprob",
    "tool_calls",
    "tool_errors",
)
_READ_COLUMNS += ("turn_lengths", "turn_is_action", "turn_weight_version", "turn_versions", "id", "data_source")
_INT_COLUMNS: tuple[str, ...] = (
    "step",
    "number",
    "group",
    "length",
    "actions",
    "turns",
    "tool_calls",
    "tool_errors",
    "staleness",
)
_INT_COLUMNS += ("status", "prompt", "source")
_FLOAT_COLUMNS = ("reward", "advantage", "logprob")


@dataclass
class Index:
    """The columns `query.COLUMNS` of n rollouts, [n] each; status, prompt and source are indices into `texts`."""

    columns: dict[str, np.ndarray]
    texts: dict[str, list[str]]
    notes: Notes = field(default_factory=Notes)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the page, with packed columns."""
        return {
            "size": len(self),
            "columns": {name: pack(column) for name, column in self.columns.items()},
            "texts": self.texts,
        }


class _TextTable:
    """Assigns consecutive ids to distinct strings."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, column: pa.ChunkedArray) -> np.ndarray:
        coded = column.combine_chunks().dictionary_encode()
        if isinstance(coded, pa.ChunkedArray):
            coded = coded.combine_chunks()
        ids = [self._ids.setdefault(str(text), len(self._ids)) for text in coded.dictionary.to_pylist()]
        indices = coded.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return np.asarray(ids or [0], np.int64)[indices]

    def values(self) -> list[str]:
        return list(self._ids)


def read_index(run_dir: Path) -> Index:
    """Index all recorded steps. Problems are added to `notes`, never raised."""
    return IndexReader(run_dir).read()


class IndexReader:
    """Repeatedly indexes a run in progress, rereading only steps whose files have changed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._text_tables = {"prompt": _TextTable(), "source": _TextTable()}
        self._cache: dict[int, tuple[object, dict[str, np.ndarray], Notes]] = {}

    def read(self) -> Index:
        notes = Notes()
        steps = list_steps(self._run_dir, notes)
        for step in steps:
            files = _files(self._run_dir, step)
            if step not in self._cache or self._cache[step][0] != files:
                step_notes = Notes()
                self._cache[step] = files, _index_step(self._run_dir, step, self._text_tables, step_notes), step_notes
            for note in self._cache[step][2]:
                notes.add(note)
        indexed = [self._cache[step][1] for step in steps if self._cache[step][1]]
        columns = {
            name: np.concatenate([np.zeros(0, np.int64), *(step_columns[name] for step_columns in indexed)])
            for name in _INT_COLUMNS
        }
        columns |= {
            name: np.concatenate([np.zeros(0), *(step_columns[name] for step_columns in indexed)])
            for name in _FLOAT_COLUMNS
        }
        texts: dict[str, list[str]] = {"status": list(STATUSES)}
        texts |= {name: table.values() for name, table in self._text_tables.items()}
        return Index(columns, texts, notes)


def _files(run_dir: Path, step: int) -> object:
    """Return a fingerprint of a step's files that changes when they do."""
    try:
        stats = [(file.name, file.stat()) for file in step_folder(run_dir, step).glob("rank_*.parquet")]
    except OSError:  # removed meanwhile by a run that repeats the step
        return None
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _index_step(run_dir: Path, step: int, text_tables: dict[str, _TextTable], notes: Notes) -> dict[str, np.ndarray]:
    """Return [n] columns of a step, sorted by number; empty if nothing can be read."""
    groups = []
    for part in open_parts(run_dir, step, notes):
        for _, table in iter_groups(part, _READ_COLUMNS, notes):
            try:
                groups.append(_index_group(table, text_tables))
            except READ_ERRORS as error:
                problem = f"{table.num_rows} rollouts are inconsistent and are excluded: {format_error(error)}"
                notes.add(f"{part.path}: {problem}")
    if not groups:
        return {}
    joined = {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}
    newest, oldest = joined.pop("newest"), joined["staleness"]
    joined["staleness"] = np.where(oldest >= 0, newest.max() - oldest, 0)
    joined["step"] = np.full(len(newest), step, np.int64)
    order = np.argsort(joined["number"], kind="stable")
    return {name: column[order] for name, column in joined.items()}


def _index_group(table: pa.Table, text_tables: dict[str, _TextTable]) -> dict[str, np.ndarray]:
    """Return [n] columns of a row group, without `step`.

    Here `staleness` and `newest` are the oldest and newest weight versions that sampled a token, -1 if none did.
    """
    size = table.num_rows
    lengths, offsets = flatten_lists(table, "turn_lengths")
    is_action, other_offsets = flatten_lists(table, "turn_is_action")
    if not np.array_equal(offsets, other_offsets) or (len(lengths) and lengths.min() < 0):
        raise ValueError("columns disagree on the number of turns, or a length is negative")
    result = {
        "length": sums(lengths, offsets),
        "actions": sums(lengths * is_action, offsets),
        "turns": sums(is_action, offsets),
        "staleness": np.full(size, -1, np.int64),
        "newest": np.full(size, -1, np.int64),
    }
    if "turn_weight_version" in table.column_names:
        versions, version_offsets = flatten_lists(table, "turn_weight_version")
        if np.array_equal(offsets, version_offsets):
            result["staleness"], result["newest"] = _version_range(table, versions, is_action.astype(bool), offsets)
    for name in ("number", "group", "tool_calls", "tool_errors"):
        result[name] = _numbers(table, name, np.int64)
    for name in _FLOAT_COLUMNS:
        result[name] = _numbers(table, name, np.float64)
    if "unscored" in table.column_names:
        scored = np.array([text == "{}" for text in table.column("unscored").to_pylist()], bool)
        result["reward"] = np.where(scored, result["reward"], np.nan)
    status_ids = {name: i for i, name in enumerate(STATUSES)}
    result["status"] = np.array([status_ids[text] for text in table.column("status").to_pylist()], np.int64)
    for name, column in (("prompt", "id"), ("source", "data_source")):
        text_column = (
            table.column(column) if column in table.column_names else pa.chunked_array([pa.array(["?"] * size)])
        )
        result[name] = text_tables[name].encode(text_column)
    return result


def _numbers(table: pa.Table, name: str, dtype: type) -> np.ndarray:
    if name not in table.column_names:
        return np.full(table.num_rows, 0 if dtype is np.int64 else np.nan, dtype)
    column = table.column(name).combine_chunks()
    if dtype is np.int64:
        column = column.fill_null(0)
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype)


def _version_range(
    table: pa.Table, versions: np.ndarray, is_action: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return [n] oldest and newest weight versions that sampled a token, -1 if none did."""
    size, row_of_turn = len(offsets) - 1, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    is_sampled = is_action & (versions >= 0)
    oldest, newest = np.full(size, 2**31, np.int64), np.full(size, -1, np.int64)
    np.minimum.at(oldest, row_of_turn[is_sampled], versions[is_sampled])
    np.maximum.at(newest, row_of_turn[is_sampled], versions[is_sampled])
    if "turn_versions" in table.column_names:  # include all versions of turns that span a weight sync
        column = table.column("turn_versions").combine_chunks()
        for row in np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)):
            runs = exact_json.loads(column[int(row)].as_py())
            oldest[row] = min([oldest[row], *(int(version) for spans in runs.values() for version, _ in spans)])
    return np.where(oldest < 2**31, oldest, -1), newest
