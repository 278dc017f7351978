"""Index of a run: one row of scalars per rollout, for the table to show, sort and filter without tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.observe.rollout_log import step_folder
from megarl.types import STATUSES
from megarl.utils import exact_json
from megarl.utils.text import one_line
from megarl.view.column_codec import pack
from megarl.view.query import MODES, TEXT_COLUMNS, Value
from megarl.view.rollout_files import READ_ERRORS, Notes, flatten_lists, iter_groups, list_steps, open_parts

_READ_COLUMNS = (
    *("number", "group", "status", "reward", "unscored", "advantage", "logprob", "tool_calls", "tool_errors"),
    *("turn_lengths", "turn_is_action", "turn_weight_version", "turn_versions", "id", "data_source", "greedy"),
)
_INT_COLUMNS = (
    *("step", "number", "group", "length", "actions", "turns", "tool_calls", "tool_errors", "staleness"),
    *("status", "prompt", "source", "mode"),
)
_FLOAT_COLUMNS = ("reward", "advantage", "logprob")


@dataclass
class Index:
    """The columns `query.COLUMNS` of n rollouts, [n] each; those of `query.TEXT_COLUMNS` are indices into `texts`."""

    columns: dict[str, np.ndarray]
    texts: dict[str, list[str]]
    notes: Notes = field(default_factory=Notes)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def iter_rows(self, rows: Sequence[int]) -> Iterator[dict[str, Value]]:
        """Yield the values of these rows by column, as a `query.Condition` takes them."""
        selected = np.fromiter(rows, np.int64, len(rows))
        columns = {name: column[selected].tolist() for name, column in self.columns.items()}
        for name, texts in self.texts.items():
            columns[name] = [texts[text_id] for text_id in columns[name]]
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the page, with packed columns."""
        return {
            "size": len(self),
            "columns": {name: pack(column) for name, column in self.columns.items()},
            "texts": self.texts,
        }


def join_columns(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate the columns of an index, which exist without any part, too."""
    dtypes = dict.fromkeys(_INT_COLUMNS, np.int64) | dict.fromkeys(_FLOAT_COLUMNS, np.float64)
    return {
        name: np.concatenate([np.zeros(0, dtype), *(columns[name] for columns in parts)])
        for name, dtype in dtypes.items()
    }


def empty_index() -> Index:
    return Index(join_columns([]), {name: [] for name in TEXT_COLUMNS})


class IndexReader:
    """Indexes all recorded steps of a run; on later calls rereads only those whose files have changed.

    Problems are added to the index's `notes`, never raised.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._text_ids: dict[str, dict[str, int]] = {"prompt": {}, "source": {}}
        self._cache: dict[int, tuple[object, dict[str, np.ndarray], Notes]] = {}

    def read(self) -> Index:
        notes = Notes()
        indexed = []
        for step in list_steps(self._run_dir, notes):
            files = _files(self._run_dir, step)
            if step not in self._cache or self._cache[step][0] != files:
                step_notes = Notes()
                self._cache[step] = files, _index_step(self._run_dir, step, self._text_ids, step_notes), step_notes
            _, columns, step_notes = self._cache[step]
            for note in step_notes:
                notes.add(note)
            if columns:
                indexed.append(columns)
        texts: dict[str, list[str]] = {"status": list(STATUSES), "mode": list(MODES)}
        texts |= {name: list(ids) for name, ids in self._text_ids.items()}
        return Index(join_columns(indexed), texts, notes)


def _files(run_dir: Path, step: int) -> object:
    """Return a fingerprint of a step's files that changes when they do."""
    try:
        stats = [(file.name, file.stat()) for file in step_folder(run_dir, step).glob("rank_*.parquet")]
    except OSError:  # removed meanwhile by a run that repeats the step
        return None
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _index_step(run_dir: Path, step: int, text_ids: dict[str, dict[str, int]], notes: Notes) -> dict[str, np.ndarray]:
    """Return [n] columns of a step, sorted by number; empty if nothing can be read."""
    groups = []
    for part in open_parts(run_dir, step, notes):
        for _, table in iter_groups(part, _READ_COLUMNS, notes):
            try:
                groups.append(_index_group(table, text_ids))
            except READ_ERRORS as error:
                problem = f"{table.num_rows} rollouts are inconsistent and are excluded: {one_line(error, 200)}"
                notes.add(f"{part.path}: {problem}")
    if not groups:
        return {}
    joined = {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}
    newest, oldest = joined.pop("newest"), joined["staleness"]
    joined["staleness"] = np.where(oldest >= 0, newest.max() - oldest, 0)
    joined["step"] = np.full(len(newest), step, np.int64)
    order = np.argsort(joined["number"], kind="stable")
    return {name: column[order] for name, column in joined.items()}


def _index_group(table: pa.Table, text_ids: dict[str, dict[str, int]]) -> dict[str, np.ndarray]:
    """Return [n] columns of a row group, without `step`.

    Here `staleness` and `newest` are the oldest and newest weight versions that sampled a token, -1 if none did.
    """
    size = table.num_rows
    lengths, offsets = flatten_lists(table, "turn_lengths")
    is_action, other_offsets = flatten_lists(table, "turn_is_action")
    if not np.array_equal(offsets, other_offsets) or (len(lengths) and lengths.min() < 0):
        raise ValueError("columns disagree on the number of turns, or a length is negative")
    rows = np.repeat(np.arange(size), np.diff(offsets))  # row of each turn
    result = {
        "length": np.bincount(rows, lengths, size).astype(np.int64),
        "actions": np.bincount(rows, lengths * is_action, size).astype(np.int64),
        "turns": np.bincount(rows, is_action, size).astype(np.int64),
        "staleness": np.full(size, -1, np.int64),
        "newest": np.full(size, -1, np.int64),
    }
    if "turn_weight_version" in table.column_names:
        versions, version_offsets = flatten_lists(table, "turn_weight_version")
        if np.array_equal(offsets, version_offsets):
            is_sampled = is_action.astype(bool) & (versions >= 0)
            result["staleness"], result["newest"] = _version_range(table, versions[is_sampled], rows[is_sampled])
    for name in ("number", "group", "tool_calls", "tool_errors"):
        result[name] = _numbers(table, name, np.int64)
    for name in _FLOAT_COLUMNS:
        result[name] = _numbers(table, name, np.float64)
    if "unscored" in table.column_names:
        is_scored = np.array([text == "{}" for text in table.column("unscored").to_pylist()], bool)
        result["reward"] = np.where(is_scored, result["reward"], np.nan)
    status_ids = {name: i for i, name in enumerate(STATUSES)}
    result["status"] = np.array([status_ids[text] for text in table.column("status").to_pylist()], np.int64)
    is_greedy = table.column("greedy").to_pylist() if "greedy" in table.column_names else [None] * size
    result["mode"] = np.array([bool(greedy) for greedy in is_greedy], np.int64)
    for name, column in (("prompt", "id"), ("source", "data_source")):
        texts = table.column(column).to_pylist() if column in table.column_names else ["?"] * size
        ids = text_ids[name]
        result[name] = np.array([ids.setdefault(text or "", len(ids)) for text in texts], np.int64)
    return result


def _numbers(table: pa.Table, name: str, dtype: type) -> np.ndarray:
    if name not in table.column_names:
        return np.full(table.num_rows, 0 if dtype is np.int64 else np.nan, dtype)
    column = table.column(name).combine_chunks()
    if dtype is np.int64:
        column = column.fill_null(0)
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype)


def _version_range(table: pa.Table, versions: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [n] oldest and newest weight versions that sampled a token, -1 if none did.

    versions, rows: weight version and row of each sampled turn.
    """
    oldest, newest = np.full(table.num_rows, 2**31, np.int64), np.full(table.num_rows, -1, np.int64)
    np.minimum.at(oldest, rows, versions)
    np.maximum.at(newest, rows, versions)
    if "turn_versions" in table.column_names:  # include all versions of turns that span a weight sync
        for row, text in enumerate(table.column("turn_versions").to_pylist()):
            if text is not None:
                runs = exact_json.loads(text)
                oldest[row] = min([oldest[row], *(int(version) for spans in runs.values() for version, _ in spans)])
    return np.where(oldest < 2**31, oldest, -1), newest
