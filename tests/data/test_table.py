"""Tables that read rows on access: equal to a sequential read, with few rows in memory."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megarl.config import ConfigError
from megarl.data import table as table_module
from megarl.data.table import Table, read_rows

pytestmark = pytest.mark.alone

ROWS = [
    {"n": n, "messages": [{"role": "user", "content": f"é{n}"}], "x": {"y": None if n % 2 else n}} for n in range(23)
]


def write_lines(path: Path) -> Path:
    """Write JSONL with a byte order mark, blank lines, CRLF and no final newline."""
    text = "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    return path


def write_parquet(path: Path, group: int = 5) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=group)
    return path


def read_table(path: Path) -> Table:
    return Table.read(path, lambda location, row: None)


@pytest.mark.parametrize("write", [write_lines, write_parquet])
def test_rows_match_a_sequential_read_in_any_order(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / ("a.jsonl" if write is write_lines else "a.parquet"))
    expected, table = list(read_rows(path)), read_table(path)
    assert [row for _, row in expected] == ROWS and list(table) == expected
    order = random.Random(1).sample(range(23), 23)
    assert [table[index] for index in order] == [expected[index] for index in order]
    assert list(table[3:9:2]) == expected[3:9:2] and list(table.select(order)) == [expected[index] for index in order]
    assert table[-1] == expected[-1] and len(table.select([])) == 0
    with pytest.raises(IndexError):
        table[23]


@pytest.mark.parametrize("write", [write_lines, write_parquet])
def test_keeps_only_selected_rows(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / ("a.jsonl" if write is write_lines else "a.parquet"))
    locations = []

    def is_even(location: str, row: dict[str, Any]) -> bool:
        locations.append(location)
        return bool(row["n"] % 2 == 0)

    table = Table.read(path, is_even, max_rows=10)
    assert [row["n"] for _, row in table] == [0, 2, 4, 6, 8] and len(locations) == 10
    assert [location for location, _ in table] == locations[::2]


def test_rows_know_their_place(tmp_path: Path) -> None:
    assert (
        read_table(write_lines(tmp_path / "a.jsonl"))[4][0] == f"{tmp_path}/a.jsonl:9"
    )  # a blank line follows each row
    assert read_table(write_parquet(tmp_path / "a.parquet"))[7][0] == f"{tmp_path}/a.parquet, row 7"


def test_row_group_cache_evicts_least_recently_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = read_table(write_parquet(tmp_path / "a.parquet"))
    read = []
    read_row_group = pyarrow.parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "read_row_group",
        lambda self, number, use_threads: (read.append(number), read_row_group(self, number))[1],
    )
    for index in (0, 4, 5, 22, 1, 6):  # the cache holds all groups
        table[index]
    assert read == [0, 1, 4]
    groups = [read_row_group(pyarrow.parquet.ParquetFile(tmp_path / "a.parquet"), number).nbytes for number in range(5)]
    monkeypatch.setattr(table_module, "CACHE_BYTES", 2 * max(groups))
    table = read_table(tmp_path / "a.parquet")
    read.clear()
    for index in (0, 5, 1, 10, 2, 6):  # the cache holds two groups: 2 evicts 1, because 0 was used later
        table[index]
    assert read == [0, 1, 2, 1]
    monkeypatch.setattr(table_module, "CACHE_BYTES", 0)
    table = read_table(tmp_path / "a.parquet")
    read.clear()
    assert [table[index][1]["n"] for index in (0, 1, 9, 0)] == [0, 1, 9, 0] and read == [0, 1, 0]


def test_large_row_groups_give_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = read_table(write_parquet(tmp_path / "a.parquet"))
    assert table.slow_read_warning == "" and read_table(write_lines(tmp_path / "a.jsonl")).slow_read_warning == ""
    monkeypatch.setattr(table_module, "CACHE_BYTES", 0)
    assert table.slow_read_warning == ""
    monkeypatch.setattr(table_module, "LARGE_ROW_GROUP_BYTES", 0)
    assert (
        "a.parquet has row groups of up to 0 MiB" in table.slow_read_warning
        and "row_group_size=1000" in table.slow_read_warning
    )


@pytest.mark.parametrize("write", [write_lines, write_parquet])
def test_file_modified_during_the_run_raises(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / ("a.jsonl" if write is write_lines else "a.parquet"))
    table = read_table(path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(ConfigError, match="was modified during the run; restart"):
        table[0]
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read any more: No such file"):
        table[0]
