"""Data files as users have them: what is read or repaired, and errors that name the place."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from megarl.config import ConfigError
from megarl.data import table as rows
from megarl.data.table import read_rows

pytestmark = pytest.mark.alone


def read(path: Path, content: bytes | str) -> list[dict[str, Any]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [row for _, row in read_rows(path)]


def test_reads_bom_crlf_nan_and_unicode_separators(tmp_path: Path) -> None:
    text = '\ufeff{"a": 1}\r\n\r\n{"a": NaN, "b": [NaN, 2.5], "c": "\\u0000"}\r\n{"a": "\u2028"}'
    expected = [{"a": 1}, {"a": None, "b": [None, 2.5], "c": "\0"}, {"a": "\u2028"}]
    assert read(tmp_path / "a.jsonl", text) == expected
    assert read(tmp_path / "A.JSONL", text) == expected


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    line = r'{"a": ["x\ud83d y", "\ud83d\ude00", {"\udc00": "\ude00\ud83d"}]}'
    assert read(tmp_path / "a.jsonl", line) == [{"a": ["x\ufffd y", "😀", {"\ufffd": "\ufffd\ufffd"}]}]


def test_reads_a_line_of_50_mb(tmp_path: Path) -> None:
    (row,) = read(tmp_path / "a.jsonl", json.dumps({"a": "x" * (50 << 20)}))
    assert len(row["a"]) == 50 << 20


INVALID_FILES: dict[str, tuple[bytes, str]] = {
    "latin-1": ('{"a": 1}\n{"a": "é"}'.encode("latin-1"), r"a\.jsonl:2: not UTF-8 at byte 7; convert the file"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "is UTF-16: convert it, by iconv"),
    "utf-16 unmarked": ('{"a": 1}'.encode("utf-16-le"), r"a\.jsonl:1: not JSON: a NUL byte"),
    "gzip": (gzip.compress(b'{"a": 1}'), "is compressed: gunzip it"),
    "parquet": (b"PAR1....", "is parquet: give it the suffix .parquet"),
    "zip": (b"PK\x03\x04..", "is an archive: unzip it"),
    "cut off": (b'{"a": 1}\n{"a": "x', r"a\.jsonl:2: not JSON: Unterminated string .*\(column 7\)"),
    "cut off by the next": (b'{"a": "x\n{"a": 1}', r"a\.jsonl:1: not JSON: Unterminated string .*\(column 7\)"),
    "open at the end": (b'{"a": 1, \n{"a": 1}', r"a\.jsonl:1: not JSON: Expecting property name .*\(column 10\)"),
    "an indented file": (b'{\n "a": 1\n}', r"a\.jsonl:1: not JSON: .*; a line must hold one complete object"),
    "two on a line": (b'{"a": 1}{"a": 2}', r"a\.jsonl:1: not JSON: Extra data \(column 9\)"),
    "a list": (b'[{"a": 1}]', r"a\.jsonl:1: a list, not an object of named columns"),
    "null": (b"null", r"a\.jsonl:1: a NoneType, not an object"),
    "zeros": (b'{"a": 1}\n\0\0\0\0', r"a\.jsonl:2: not JSON: a NUL byte"),
    "nested": (b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}", r"a\.jsonl:1: nested too deeply; 64 levels"),
    "nested within Python's limit": (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", r"a\.jsonl:1: nested too deeply"),
    "a number of 5001 digits": (b'{"a": 1' + b"0" * 5000 + b"}", r"a\.jsonl:1: Exceeds the limit \(4300 dig[^;]*$"),
    "a key twice": (b'{"a": 1, "b": {"c": 1, "c": 2}}', r"a\.jsonl:1: an object has 'c' twice"),
}


@pytest.mark.parametrize("name", INVALID_FILES)
def test_invalid_content_raises(tmp_path: Path, name: str) -> None:
    content, message = INVALID_FILES[name]
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "a.jsonl", content)


def test_overlong_line_raises_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: more than 1 MiB"):
        read(tmp_path / "a.jsonl", b"x" * ((1 << 20) + 1))


def test_non_files_raise(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    for name, message in {
        "pipe.jsonl": "not a regular file",
        "zero.jsonl": "not a regular file",
        "gone.jsonl": "no data file",
        ".": "is a folder",
        "x" * 300 + ".jsonl": "no data file x*: File name too long".replace("x*", ".*x"),
    }.items():
        with pytest.raises(ConfigError, match=message):
            list(read_rows(tmp_path / name))


def write(path: Path, table: pyarrow.Table) -> Path:
    pyarrow.parquet.write_table(table, path)
    return path


def test_reads_parquet(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    messages = [{"role": "user", "content": "x", "tool_calls": None}, {"role": "assistant", "tool_calls": calls}]
    columns = {"messages": [messages], "info": [{"a": None, "b": float("nan")}], "text": [b"bytes"], "image": [b"\xff"]}
    path = write(tmp_path / "A.PARQUET", pyarrow.table(columns))
    assert list(read_rows(path)) == [
        (
            f"{path}, row 0",
            {
                "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}],
                "info": {"a": None, "b": None},
                "text": "bytes",
                "image": b"\xff",
            },
        )
    ]


def test_invalid_parquet_raises(tmp_path: Path) -> None:
    full = write(tmp_path / "a.parquet", pyarrow.table({"a": ["x" * 100] * 1000})).read_bytes()
    for content in (full[: len(full) // 2], b"", b'{"a": 1}', b"PAR1" + bytes(100) + b"PAR1"):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(ConfigError, match="a.parquet cannot be read as parquet: "):
            list(read_rows(tmp_path / "a.parquet"))
    path = write(tmp_path / "b.parquet", pyarrow.Table.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"]))
    with pytest.raises(ConfigError, match="has two columns 'a'; rename one"):
        list(read_rows(path))
    binary_column = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
    )
    with pytest.raises(ConfigError, match="c.parquet cannot be read as parquet: 'utf-8' codec"):
        list(read_rows(write(tmp_path / "c.parquet", pyarrow.Table.from_arrays([binary_column], names=["a"]))))


def test_parquet_types_become_json_types(tmp_path: Path) -> None:
    columns = {
        "map": pyarrow.array([[("a", 1), ("b", None)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "maps": pyarrow.array([[[("a", 1)]]], pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.int64()))),
        "decimal": pyarrow.array([decimal.Decimal("2.00")]),
        "part": pyarrow.array([decimal.Decimal("2.50")]),
        "time": pyarrow.array([datetime.datetime(2020, 1, 2, 3, 4)]),
        "day": pyarrow.array([datetime.date(2020, 1, 2)]),
        "long": pyarrow.array([1500], pyarrow.duration("ms")),
        "word": pyarrow.array(["x"]).dictionary_encode(),
        "large": pyarrow.array(["x"], pyarrow.large_string()),
        "array": pyarrow.array([[[1.0, 2.0], [3.0, 4.0]]], pyarrow.list_(pyarrow.list_(pyarrow.float32(), 2))),
    }
    ((_, row),) = read_rows(write(tmp_path / "a.parquet", pyarrow.table(columns)))
    assert json.loads(json.dumps(row)) == row
    assert row == {
        "map": {"a": 1, "b": None},
        "maps": [{"a": 1}],
        "decimal": 2,
        "part": 2.5,
        "time": "2020-01-02T03:04:00",
        "day": "2020-01-02",
        "long": 1.5,
        "word": "x",
        "large": "x",
        "array": [[1.0, 2.0], [3.0, 4.0]],
    }


def test_pandas_numpy_columns_become_lists(tmp_path: Path) -> None:
    messages = np.array([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], dtype=object)
    frame = pandas.DataFrame({"messages": [messages], "scores": [np.array([1.0, np.nan])], "n": [np.int64(3)]})
    frame.to_parquet(tmp_path / "a.parquet")
    ((_, row),) = read_rows(tmp_path / "a.parquet")
    assert row == {"messages": messages.tolist(), "scores": [1.0, None], "n": 3} and type(row["n"]) is int
