"""A row of figures for each rollout of a run: what a table shows, sorts and filters without the tokens."""

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
    "lag",
)
_INT_COLUMNS += ("status", "prompt", "source")
_FLOAT_COLUMNS = ("reward", "advantage", "logprob")


@dataclass
class Index:
    """columns: [n] each, by the names of `query.COLUMNS`; status, prompt and source are places in `texts`."""

    columns: dict[str, np.ndarray]
    texts: dict[str, list[str]]
    notes: Notes = field(default_factory=Notes)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def to_dict(self) -> dict[str, Any]:
        """For the page, columns packed."""
        return {
            "size": len(self),
            "columns": {name: pack(column) for name, column in self.columns.items()},
            "texts": self.texts,
        }


class _TextTable:
    """Places of texts in a list of each once."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, column: pa.ChunkedArray) -> np.ndarray:
        coded = column.combine_chunks().dictionary_encode()
        if isinstance(coded, pa.ChunkedArray):
            coded = coded.combine_chunks()
        own = [self._ids.setdefault(str(text), len(self._ids)) for text in coded.dictionary.to_pylist()]
        indices = coded.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return np.asarray(own or [0], np.int64)[indices]

    def values(self) -> list[str]:
        return list(self._ids)


def read_index(run_dir: Path) -> Index:
    """Of all recorded steps. Nothing is raised for what is broken; `notes` say it."""
    return IndexReader(run_dir).read()


class IndexReader:
    """Reads a run that goes on again and again: each time only the steps whose files have changed."""

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
                own = Notes()
                self._cache[step] = files, _index_step(self._run_dir, step, self._text_tables, own), own
            for note in self._cache[step][2]:
                notes.add(note)
        found = [self._cache[step][1] for step in steps if self._cache[step][1]]
        columns = {
            name: np.concatenate([np.zeros(0, np.int64), *(one[name] for one in found)]) for name in _INT_COLUMNS
        }
        columns |= {name: np.concatenate([np.zeros(0), *(one[name] for one in found)]) for name in _FLOAT_COLUMNS}
        texts: dict[str, list[str]] = {"status": list(STATUSES)}
        texts |= {name: of.values() for name, of in self._text_tables.items()}
        return Index(columns, texts, notes)


def _files(run_dir: Path, step: int) -> object:
    """What tells whether a step's files have changed."""
    try:
        found = [(file.name, file.stat()) for file in step_folder(run_dir, step).glob("rank_*.parquet")]
    except OSError:  # removed meanwhile, by a run that takes the step again
        return None
    return sorted((name, about.st_size, about.st_mtime_ns) for name, about in found)


def _index_step(run_dir: Path, step: int, texts: dict[str, _TextTable], notes: Notes) -> dict[str, np.ndarray]:
    """[n] each, in the order of their numbers; empty where nothing can be read."""
    found = []
    for part in open_parts(run_dir, step, notes):
        for _, table in iter_groups(part, _READ_COLUMNS, notes):
            try:
                found.append(_index_group(table, texts))
            except READ_ERRORS as error:
                what = f"{table.num_rows} rollouts make no sense and are left out: {format_error(error)}"
                notes.add(f"{part.path}: {what}")
    if not found:
        return {}
    joined = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
    newest, oldest = joined.pop("newest"), joined["lag"]
    joined["lag"] = np.where(oldest >= 0, newest.max() - oldest, 0)
    joined["step"] = np.full(len(newest), step, np.int64)
    order = np.argsort(joined["number"], kind="stable")
    return {name: column[order] for name, column in joined.items()}


def _index_group(table: pa.Table, texts: dict[str, _TextTable]) -> dict[str, np.ndarray]:
    """[n] each, without the step; `lag` is the oldest version of weights that wrote a token, -1 where none did, and
    `newest` the newest."""
    size = table.num_rows
    lengths, ends = flatten_lists(table, "turn_lengths")
    written, other_ends = flatten_lists(table, "turn_is_action")
    if not np.array_equal(ends, other_ends) or (len(lengths) and lengths.min() < 0):
        raise ValueError("turns are not as many in every column, or of a negative length")
    figures = {
        "length": sums(lengths, ends),
        "actions": sums(lengths * written, ends),
        "turns": sums(written, ends),
        "lag": np.full(size, -1, np.int64),
        "newest": np.full(size, -1, np.int64),
    }
    if "turn_weight_version" in table.column_names:
        versions, version_ends = flatten_lists(table, "turn_weight_version")
        if np.array_equal(ends, version_ends):
            figures["lag"], figures["newest"] = _version_range(table, versions, written.astype(bool), ends)
    for name in ("number", "group", "tool_calls", "tool_errors"):
        figures[name] = _numbers(table, name, np.int64)
    for name in _FLOAT_COLUMNS:
        figures[name] = _numbers(table, name, np.float64)
    if "unscored" in table.column_names:
        scored = np.array([text == "{}" for text in table.column("unscored").to_pylist()], bool)
        figures["reward"] = np.where(scored, figures["reward"], np.nan)
    known = {name: place for place, name in enumerate(STATUSES)}
    figures["status"] = np.array([known[text] for text in table.column("status").to_pylist()], np.int64)
    for name, column in (("prompt", "id"), ("source", "data_source")):
        there = table.column(column) if column in table.column_names else pa.chunked_array([pa.array(["?"] * size)])
        figures[name] = texts[name].encode(there)
    return figures


def _numbers(table: pa.Table, name: str, kind: type) -> np.ndarray:
    if name not in table.column_names:
        return np.full(table.num_rows, 0 if kind is np.int64 else np.nan, kind)
    column = table.column(name).combine_chunks()
    if kind is np.int64:
        column = column.fill_null(0)
    return np.asarray(column.to_numpy(zero_copy_only=False), kind)


def _version_range(
    table: pa.Table, versions: np.ndarray, written: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[n] oldest and newest version that wrote a token, -1 where none did."""
    size, of_turn = len(ends) - 1, np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    there = written & (versions >= 0)
    oldest, newest = np.full(size, 2**31, np.int64), np.full(size, -1, np.int64)
    np.minimum.at(oldest, of_turn[there], versions[there])
    np.maximum.at(newest, of_turn[there], versions[there])
    if "turn_versions" in table.column_names:  # of turns during which the weights changed the first is the oldest
        column = table.column("turn_versions").combine_chunks()
        for row in np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)):
            runs = exact_json.loads(column[int(row)].as_py())
            oldest[row] = min([oldest[row], *(int(version) for spans in runs.values() for version, _ in spans)])
    return np.where(oldest < 2**31, oldest, -1), newest
