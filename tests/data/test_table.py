"""Rows that are read when asked for: the same as those read one after the other, and few of them in memory."""

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


def lines(path: Path) -> Path:
    """With what editors leave: a byte order mark, blank lines, other ends of lines, and none at the end."""
    text = "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    return path


def parquet(path: Path, group: int = 5) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=group)
    return path


def whole(path: Path) -> Table:
    return Table.read(path, lambda where, row: None)


@pytest.mark.parametrize("write", [lines, parquet])
def test_in_any_order_they_are_what_a_reader_finds(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / ("a.jsonl" if write is lines else "a.parquet"))
    expected, table = list(read_rows(path)), whole(path)
    assert [row for _, row in expected] == ROWS and list(table) == expected
    order = random.Random(1).sample(range(23), 23)
    assert [table[index] for index in order] == [expected[index] for index in order]
    assert list(table[3:9:2]) == expected[3:9:2] and list(table.select(order)) == [expected[index] for index in order]
    assert table[-1] == expected[-1] and len(table.select([])) == 0
    with pytest.raises(IndexError):
        table[23]


@pytest.mark.parametrize("write", [lines, parquet])
def test_rows_that_are_not_used_are_not_there(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / ("a.jsonl" if write is lines else "a.parquet"))
    seen = []

    def even(where: str, row: dict[str, Any]) -> bool:
        seen.append(where)
        return bool(row["n"] % 2 == 0)

    table = Table.read(path, even, max_rows=10)
    assert [row["n"] for _, row in table] == [0, 2, 4, 6, 8] and len(seen) == 10
    assert [where for where, _ in table] == seen[::2]


def test_a_mistake_found_later_names_the_same_place(tmp_path: Path) -> None:
    assert whole(lines(tmp_path / "a.jsonl"))[4][0] == f"{tmp_path}/a.jsonl:9"  # there is a blank line after each
    assert whole(parquet(tmp_path / "a.parquet"))[7][0] == f"{tmp_path}/a.parquet, row 7"


def test_of_a_large_file_the_row_groups_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = whole(parquet(tmp_path / "a.parquet"))
    read = []
    once = pyarrow.parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "read_row_group",
        lambda self, number, use_threads: (read.append(number), once(self, number))[1],
    )
    for index in (0, 4, 5, 22, 1, 6):  # all of it is small enough to stay
        table[index]
    assert read == [0, 1, 4]
    groups = [once(pyarrow.parquet.ParquetFile(tmp_path / "a.parquet"), number).nbytes for number in range(5)]
    monkeypatch.setattr(table_module, "CACHE_BYTES", 2 * max(groups))
    table = whole(tmp_path / "a.parquet")
    read.clear()
    for index in (0, 5, 1, 10, 2, 6):  # two of them: 1 goes for 2, as 0 was used after it
        table[index]
    assert read == [0, 1, 2, 1]
    monkeypatch.setattr(table_module, "CACHE_BYTES", 0)
    table = whole(tmp_path / "a.parquet")
    read.clear()
    assert [table[index][1]["n"] for index in (0, 1, 9, 0)] == [0, 1, 9, 0] and read == [0, 1, 0]


def test_row_groups_that_are_slow_to_read_are_said_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = whole(parquet(tmp_path / "a.parquet"))
    assert table.slow_read_warning == "" and whole(lines(tmp_path / "a.jsonl")).slow_read_warning == ""
    monkeypatch.setattr(table_module, "CACHE_BYTES", 0)
    assert table.slow_read_warning == ""
    monkeypatch.setattr(table_module, "LARGE_ROW_GROUP_BYTES", 0)
    assert (
        "a.parquet has row groups of up to 0 MiB" in table.slow_read_warning
        and "row_group_size=1000" in table.slow_read_warning
    )


@pytest.mark.parametrize("write", [lines, parquet])
def test_a_file_that_changes_meanwhile_is_an_error(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / ("a.jsonl" if write is lines else "a.parquet"))
    table = whole(path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(ConfigError, match="was modified during the run; restart"):
        table[0]
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read any more: No such file"):
        table[0]
