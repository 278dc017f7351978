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
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow
import pyarrow.parquet

from megarl.config import ConfigError
from megarl.config.strict import LFS_HEADER, LFS_REMEDY, describe_lfs_pointer

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
    kinds = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}
    try:
        if not file.exists():
            raise ConfigError(f"no data file {file}; check data.train and data.eval")
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; name a .parquet or .jsonl file")
        if not file.is_file():  # reading from a pipe or a device may never end
            raise ConfigError(f"{file} is not a regular file; name a .parquet or .jsonl file")
    except OSError as error:
        raise ConfigError(f"no data file {str(file)[:200]}: {error.strerror}") from None
    if file.suffix.lower() not in kinds:
        raise ConfigError(f"{file}: the suffix {file.suffix!r} is not known; data files are .parquet or .jsonl")
    return kinds[file.suffix.lower()](file)


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
        row = json.loads(text, object_pairs_hook=_unique_object)
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


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has {next(name for name in names if names.count(name) > 1)!r} twice")
    return result


def _parquet_rows(file: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    number = 0
    try:
        with open_parquet(file) as table:
            for batch in table.iter_batches(batch_size=1000, use_threads=False):  # not the whole table at once
                for row in to_dicts(batch):
                    location = f"{file}, row {number}"
                    yield number, location, to_json_row(row, location)
                    number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise parquet_error(file, error) from None


def open_parquet(file: Path) -> pyarrow.parquet.ParquetFile:
    table = pyarrow.parquet.ParquetFile(file.absolute())  # pyarrow would expand ~x to a user's home
    names = table.schema_arrow.names
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{file} has two columns {min(duplicates)!r}; rename one")
    return table


def parquet_error(file: Path, error: Exception) -> ConfigError:
    return ConfigError(describe_lfs_pointer(file) or f"{file} cannot be read as parquet: {str(error).splitlines()[0]}")


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
        try:
            value.encode()
            return value
        except UnicodeEncodeError:  # joins complete surrogate pairs
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
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

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        return self.select(range(*index.indices(len(self)))) if isinstance(index, slice) else self.get(index)


class Table(LazySequence[Row]):
    """Rows of a .jsonl or .parquet file by index; those of a parquet file are read with their row group.

    `Table.read` reads the whole file once. Raises ConfigError, also on later access if the file has changed.
    """

    def __init__(self, source: _Source, positions: np.ndarray) -> None:
        self._source = source
        self._positions = positions  # [rows, 2] int64: position, and the line or row number for messages

    @staticmethod
    def read(file: Path, accept: Callable[[str, dict[str, Any]], bool | None], max_rows: int | None = None) -> Table:
        """Read the rows, or the first `max_rows`, and keep those for which `accept` does not return False.

        `accept` is called once per row, in order, and may raise for an invalid row.
        """
        positions = array("q")
        rows = scan_rows(file)
        stamp = _file_stamp(file)
        for count, (place, location, row) in enumerate(rows):
            if count == max_rows:
                break
            if accept(location, row) is not False:
                positions.extend((place, place if is_parquet(file) else int(location.rpartition(":")[2])))
        source = (_ParquetSource if is_parquet(file) else _JsonlSource)(file, stamp)
        return Table(source, np.array(positions, dtype=np.int64).reshape(-1, 2))

    def __len__(self) -> int:
        return len(self._positions)

    def select(self, indices: Sequence[int] | np.ndarray) -> Table:
        return Table(self._source, self._positions[np.asarray(indices, dtype=np.int64)])

    def get(self, index: int) -> Row:
        place, number = self._positions[index].tolist()
        self._source.check()
        return self._source.row(place, number)

    @property
    def slow_read_warning(self) -> str:
        """A warning with a remedy if random access to single rows is slow; otherwise empty."""
        return self._source.slow_read_warning()


class _Source(ABC):
    """A file in the version that was read first."""

    def __init__(self, file: Path, stamp: tuple[int, int]) -> None:
        self.file = file
        self._stamp = stamp

    def check(self) -> None:
        try:
            is_unchanged = _file_stamp(self.file) == self._stamp
        except OSError as error:
            raise ConfigError(f"{self.file} cannot be read any more: {error.strerror}") from None
        if not is_unchanged:
            raise ConfigError(f"{self.file} was modified during the run; restart with a private copy")

    @abstractmethod
    def row(self, position: int, number: int) -> Row:
        """Read the row at a position. number: its line or row number, for messages."""

    def slow_read_warning(self) -> str:
        return ""


class _JsonlSource(_Source):
    def row(self, position: int, number: int) -> Row:
        location = f"{self.file}:{number}"
        with self.file.open("rb") as lines:
            lines.seek(position)
            return location, parse_line(lines.readline(), location, first=position == 0)


class _ParquetSource(_Source):
    def __init__(self, file: Path, stamp: tuple[int, int]) -> None:
        super().__init__(file, stamp)
        self._groups: OrderedDict[int, pyarrow.Table] = OrderedDict()  # least recently used first
        try:
            with open_parquet(file) as table:
                groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        except (pyarrow.ArrowException, OSError) as error:
            raise parquet_error(file, error) from None
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
        self._sizes = [group.total_byte_size for group in groups]

    def row(self, position: int, number: int) -> Row:
        group = bisect_right(self._starts, position) - 1
        location = f"{self.file}, row {number}"
        try:
            table = self._group(group)
            return location, to_json_row(to_dicts(table.slice(position - self._starts[group], 1))[0], location)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise parquet_error(self.file, error) from None

    def _group(self, number: int) -> pyarrow.Table:
        if number not in self._groups:
            with open_parquet(self.file) as table:
                row_group = table.read_row_group(number, use_threads=False)  # other ranks use the other cores
            while (
                self._groups and row_group.nbytes + sum(group.nbytes for group in self._groups.values()) > CACHE_BYTES
            ):
                self._groups.popitem(last=False)
            self._groups[number] = row_group
        self._groups.move_to_end(number)
        return self._groups[number]

    def slow_read_warning(self) -> str:
        if sum(self._sizes) <= CACHE_BYTES or max(self._sizes) <= LARGE_ROW_GROUP_BYTES:
            return ""
        return (
            f"{self.file} has row groups of up to {max(self._sizes) >> 20} MiB, one of which is read for each row; "
            f"rewrite it with row_group_size=1000"
        )


def _file_stamp(file: Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns
