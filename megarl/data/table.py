"""Read rows of .jsonl and .parquet files on demand: memory holds the position of a row, not the row.

A malformed row is a ConfigError that names file and line. Missing values and damaged text are repaired: NaN, which
pandas writes for missing values, becomes null, and half a surrogate pair (a truncated emoji) U+FFFD. Parquet types
become JSON types: a map an object, a decimal a number, a date or time an ISO 8601 string, a duration seconds.

The position of a row is the byte at which its line starts, or its number in a parquet file.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import os
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow
import pyarrow.parquet

from megarl.config import ConfigError
from megarl.config.strict import LFS_HEADER, LFS_REMEDY, describe_lfs_pointer, unique_object
from megarl.utils.text import replace_surrogates

Item = TypeVar("Item")

MAX_LINE_BYTES = 64 << 20
"""Maximum bytes of a line. A longer one is no conversation, but a file of another form, or a device."""
MAX_DEPTH = 64
"""Maximum nesting of objects and lists in a row."""
_MAGIC = {
    b"\x1f\x8b": "is compressed: gunzip it",
    b"BZh": "is compressed: bunzip2 it",
    b"\xfd7zXZ": "is compressed: unxz it",
    b"\x28\xb5\x2f\xfd": "is compressed: unzstd it",
    b"PK\x03\x04": "is an archive: unzip it",
    b"PAR1": "is parquet: give it the suffix .parquet",
    LFS_HEADER: LFS_REMEDY,
    b"\xff\xfe": "is UTF-16: convert it, by iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "is UTF-16: convert it, by iconv -f UTF-16 -t UTF-8",
}
"""First bytes of files that are not JSON in UTF-8, whatever their suffix."""
_UTF8_BOM = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, which some editors put before the first line."""


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, row) for each row of a .parquet or .jsonl file; `location` names the row in messages.

    Only a few rows are in memory at a time. Raises ConfigError.
    """
    return ((location, row) for _, location, row in scan_rows(file))


def scan_rows(file: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield (position, location, row), as `read_rows`."""
    try:
        if not file.exists():
            raise ConfigError(f"no data file {file}; check data.train and data.eval")
        if not file.is_file():  # reading from a pipe or a device may never end
            kind = "a folder" if file.is_dir() else "not a regular file"
            raise ConfigError(f"{file} is {kind}; name a .parquet or .jsonl file")
    except OSError as error:
        raise ConfigError(f"no data file {str(file)[:200]}: {error.strerror}") from None
    if not is_parquet(file) and file.suffix.lower() != ".jsonl":
        raise ConfigError(f"{file}: the suffix {file.suffix!r} is not known; data files are .parquet or .jsonl")
    return _parquet_rows(file) if is_parquet(file) else _jsonl_rows(file)


def is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"


def _jsonl_rows(file: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    try:
        with file.open("rb") as lines:
            number = next_offset = 0
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number, offset, next_offset = number + 1, next_offset, next_offset + len(line)
                location = f"{file}:{number}"
                if number == 1:
                    for magic, problem in _MAGIC.items():
                        if line.removeprefix(_UTF8_BOM).startswith(magic):
                            raise ConfigError(f"{file} {problem}")
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{location}: more than {MAX_LINE_BYTES >> 20} MiB; a line must hold one row")
                if line.removeprefix(_UTF8_BOM if number == 1 else b"").strip():
                    yield offset, location, parse_line(line, location, first=number == 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def parse_line(line: bytes, location: str, first: bool) -> dict[str, Any]:
    """Parse a line of a .jsonl file. first: it is the file's first line."""
    try:
        text = line.removeprefix(_UTF8_BOM if first else b"").rstrip(b"\r\n").decode("utf-8")
        row = json.loads(text, object_pairs_hook=unique_object)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{location}: not UTF-8 at byte {error.start}; convert the file, by iconv -f LATIN1 -t UTF-8 or what "
            "it is in"
        ) from None
    except RecursionError:
        raise ConfigError(f"{location}: nested too deeply; {MAX_DEPTH} levels are the maximum") from None
    except json.JSONDecodeError as error:
        problem = "a NUL byte" if b"\0" in line else error.msg
        raise ConfigError(
            f"{location}: not JSON: {problem} (column {error.pos + 1}); a line must hold one complete object"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{location}: {str(error).split(';')[0]}") from None  # a number with thousands of digits
    if not isinstance(row, dict):
        raise ConfigError(f"{location}: a {type(row).__name__}, not an object of named columns")
    plain: dict[str, Any] = _to_json_value(row, location)
    return plain


def _parquet_rows(file: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    with _parquet_errors(file), open_parquet(file) as table:
        batches = table.iter_batches(batch_size=1000, use_threads=False)  # not the whole table at once
        for number, row in enumerate(chain.from_iterable(map(to_dicts, batches))):
            location = f"{file}, row {number}"
            yield number, location, to_json_row(row, location)


@contextmanager
def _parquet_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = f"{file} cannot be read as parquet: {str(error).splitlines()[0]}"
        raise ConfigError(describe_lfs_pointer(file) or problem) from None


def open_parquet(file: Path) -> pyarrow.parquet.ParquetFile:
    table = pyarrow.parquet.ParquetFile(file.absolute())  # pyarrow would expand ~x to a user's home
    names = table.schema_arrow.names
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{file} has two columns {min(duplicates)!r}; rename one")
    return table


def to_dicts(rows: pyarrow.RecordBatch | pyarrow.Table) -> list[dict[str, Any]]:
    """Convert rows to Python values, with maps as objects; of duplicate map keys the last one counts."""
    dicts: list[dict[str, Any]] = rows.to_pylist(maps_as_pydicts="lossy")
    return dicts


def to_json_row(row: dict[str, Any], location: str) -> dict[str, Any]:
    """Convert a row of a parquet file to the form of a .jsonl file."""
    columns = _to_json_value(row, location).items()
    return {name: _drop_nulls(value) if isinstance(value, list) else value for name, value in columns}


def _drop_nulls(value: Any) -> Any:
    """Drop null fields: in a column of structs, each struct has every field that any of them has."""
    if isinstance(value, dict):
        return {name: _drop_nulls(item) for name, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _to_json_value(value: Any, location: str, depth: int = 0) -> Any:
    """Convert a value to JSON types, see the module docstring."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict | list) and depth == MAX_DEPTH:
        raise ConfigError(f"{location}: nested too deeply; {MAX_DEPTH} levels are the maximum")
    if isinstance(value, dict):
        return {
            _to_json_value(name, location): _to_json_value(item, location, depth + 1) for name, item in value.items()
        }
    if isinstance(value, list):
        return [_to_json_value(item, location, depth + 1) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value.total_seconds() if isinstance(value, datetime.timedelta) else value


CACHE_BYTES = 256 << 20
"""Maximum bytes of decoded row groups that stay in memory.

Of a larger file the most recently used ones stay, at least one.
"""
LARGE_ROW_GROUP_BYTES = 64 << 20
"""Bytes from which on a row group is slow to read for a single row."""

Row = tuple[str, dict[str, Any]]
"""(location, row): file and line for messages, and the columns."""


class LazySequence(Sequence[Item]):
    """A sequence that makes items on access; its slices do so, too."""

    @abstractmethod
    def get(self, index: int) -> Item:
        """Return one item. Raises IndexError beyond the end."""

    @abstractmethod
    def select(self, indices: Sequence[int]) -> Sequence[Item]:
        """Return the items at these indices, in this order."""

    def __getitem__(self, index: Any) -> Any:
        return self.select(range(*index.indices(len(self)))) if isinstance(index, slice) else self.get(index)


class Table(LazySequence[Row]):
    """Rows of a .jsonl or .parquet file by index; those of a parquet file are read with their row group.

    `Table.read` reads the whole file once. Raises ConfigError, also on later access if the file has changed.
    """

    def __init__(self, file: Path, stamp: tuple[int, int], positions: np.ndarray, groups: _RowGroups | None) -> None:
        self._file, self._stamp, self._groups = file, stamp, groups
        self._positions = positions  # [rows, 2] int64: position, and the line or row number for messages

    @staticmethod
    def read(file: Path, accept: Callable[[str, dict[str, Any]], bool | None], max_rows: int | None = None) -> Table:
        """Read the rows, or the first `max_rows`, and keep those for which `accept` does not return False.

        `accept` is called once per row, in order, and may raise for an invalid row.
        """
        positions = array("q")
        rows = scan_rows(file)
        stamp = _file_stamp(file)
        for position, location, row in islice(rows, max_rows):
            if accept(location, row) is not False:
                positions.extend((position, position if is_parquet(file) else int(location.rpartition(":")[2])))
        groups = _RowGroups(file) if is_parquet(file) else None
        return Table(file, stamp, np.array(positions, dtype=np.int64).reshape(-1, 2), groups)

    def __len__(self) -> int:
        return len(self._positions)

    def select(self, indices: Sequence[int] | np.ndarray) -> Table:
        return Table(self._file, self._stamp, self._positions[np.asarray(indices, dtype=np.int64)], self._groups)

    def get(self, index: int) -> Row:
        position, number = self._positions[index].tolist()
        try:
            is_unchanged = _file_stamp(self._file) == self._stamp
        except OSError as error:
            raise ConfigError(f"{self._file} cannot be read any more: {error.strerror}") from None
        if not is_unchanged:
            raise ConfigError(f"{self._file} was modified during the run; restart with a private copy")
        if self._groups is not None:
            location = f"{self._file}, row {number}"
            return location, to_json_row(self._groups.read_row(position), location)
        location = f"{self._file}:{number}"
        with self._file.open("rb") as lines:
            lines.seek(position)
            return location, parse_line(lines.readline(), location, first=position == 0)

    @property
    def slow_read_warning(self) -> str:
        """A warning with a remedy if random access to single rows is slow; otherwise empty."""
        sizes = self._groups.sizes if self._groups is not None else [0]
        if sum(sizes) <= CACHE_BYTES or max(sizes) <= LARGE_ROW_GROUP_BYTES:
            return ""
        return (
            f"{self._file} has row groups of up to {max(sizes) >> 20} MiB, one of which is read for each row; "
            f"rewrite it with row_group_size=1000"
        )


class _RowGroups:
    """Row groups of a parquet file; those used last stay in memory."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._cache: OrderedDict[int, pyarrow.Table] = OrderedDict()  # least recently used first
        with _parquet_errors(file), open_parquet(file) as table:
            groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
        self.sizes = [group.total_byte_size for group in groups]

    def read_row(self, position: int) -> dict[str, Any]:
        number = bisect_right(self._starts, position) - 1
        with _parquet_errors(self._file):
            if number not in self._cache:
                with open_parquet(self._file) as table:
                    group = table.read_row_group(number, use_threads=False)  # other ranks use the other cores
                while self._cache and group.nbytes + sum(used.nbytes for used in self._cache.values()) > CACHE_BYTES:
                    self._cache.popitem(last=False)
                self._cache[number] = group
            self._cache.move_to_end(number)
            return to_dicts(self._cache[number].slice(position - self._starts[number], 1))[0]


def _file_stamp(file: Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns
