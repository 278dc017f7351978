"""Rows of a file that are read when they are asked for: what stays in memory of a row is its place."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow

from megarl.config import ConfigError
from megarl.data.rows import dicts, is_parquet, not_parquet, open_parquet, parsed, plain_row, scan

KEPT = 256 << 20
"""Bytes of a parquet file's row groups, as Arrow has them, that stay in memory: all of a file that is not larger. Of a
larger one those that were asked for last, but always one whole."""
LARGE = 64 << 20
"""Bytes of a row group that are slow to read for the sake of one row."""

Row = tuple[str, dict[str, Any]]
"""(where, row): where it is from, for messages."""


class Table(Sequence[Row]):
    """Rows of a .jsonl or .parquet file, by number; those of a parquet file come with their row group.

    `Table.read` goes through the whole file once. Raises ConfigError, also later, if the file has changed meanwhile.
    """

    def __init__(self, source: _Source, places: np.ndarray) -> None:
        self._source = source
        self._places = places  # [rows, 2] int64: place, and the number of the line that messages name

    @staticmethod
    def read(file: Path, use: Callable[[str, dict[str, Any]], bool | None], most: int | None = None) -> Table:
        """The rows, or the first `most`, of which `use` does not say False. It is called once for each, in order, and
        may raise for what is wrong with it."""
        places = array("q")
        rows = scan(file)
        before = _mark(file)
        for count, (place, where, row) in enumerate(rows):
            if count == most:
                break
            if use(where, row) is not False:
                places.extend((place, place if is_parquet(file) else int(where.rpartition(":")[2])))
        source = (_Parquet if is_parquet(file) else _Lines)(file, before)
        return Table(source, np.array(places, dtype=np.int64).reshape(-1, 2))

    def __len__(self) -> int:
        return len(self._places)

    def only(self, indices: Sequence[int] | np.ndarray) -> Table:
        return Table(self._source, self._places[np.asarray(indices, dtype=np.int64)])

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Table: ...

    def __getitem__(self, index: int | slice) -> Row | Table:
        if isinstance(index, slice):
            return Table(self._source, self._places[index])
        place, number = self._places[index].tolist()
        self._source.check()
        return self._source.row(place, number)

    @property
    def slow(self) -> str:
        """A line with the remedy, where one row after the other in any order is slow to read; else empty."""
        return self._source.slow()


class _Source:
    """A file as it was when it was read first."""

    def __init__(self, file: Path, mark: tuple[int, int]) -> None:
        self.file = file
        self._mark = mark

    def check(self) -> None:
        try:
            same = _mark(self.file) == self._mark
        except OSError as error:
            raise ConfigError(f"{self.file} cannot be read any more: {error.strerror}") from None
        if not same:
            raise ConfigError(f"{self.file} was changed while the run reads it; start again, with a copy of its own")

    def row(self, place: int, number: int) -> Row:
        raise NotImplementedError

    def slow(self) -> str:
        return ""


class _Lines(_Source):
    def row(self, place: int, number: int) -> Row:
        where = f"{self.file}:{number}"
        with self.file.open("rb") as lines:
            lines.seek(place)
            return where, parsed(lines.readline(), where, first=place == 0)


class _Parquet(_Source):
    def __init__(self, file: Path, mark: tuple[int, int]) -> None:
        super().__init__(file, mark)
        self._groups: OrderedDict[int, pyarrow.Table] = OrderedDict()  # the last that were used, the latest at the end
        try:
            with open_parquet(file) as table:
                groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        except (pyarrow.ArrowException, OSError) as error:
            raise not_parquet(file, error) from None
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
        self._sizes = [group.total_byte_size for group in groups]

    def row(self, place: int, number: int) -> Row:
        group = bisect_right(self._starts, place) - 1
        where = f"{self.file}, row {number}"
        try:
            table = self._group(group)
            return where, plain_row(dicts(table.slice(place - self._starts[group], 1))[0], where)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise not_parquet(self.file, error) from None

    def _group(self, number: int) -> pyarrow.Table:
        if number not in self._groups:
            with open_parquet(self.file) as table:
                found = table.read_row_group(number, use_threads=False)  # other ranks have the other cores
            while self._groups and found.nbytes + sum(group.nbytes for group in self._groups.values()) > KEPT:
                self._groups.popitem(last=False)
            self._groups[number] = found
        self._groups.move_to_end(number)
        return self._groups[number]

    def slow(self) -> str:
        if sum(self._sizes) <= KEPT or max(self._sizes) <= LARGE:
            return ""
        return (
            f"{self.file} has row groups of up to {max(self._sizes) >> 20} MiB, one of which is read for each row that "
            "is dealt out; write it anew with row_group_size=1000"
        )


def _mark(file: Path) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns
