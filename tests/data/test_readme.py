"""The README's example rows, as JSONL and parquet: all rows of a table parse to the same value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megarl.data.columns import parse_conversation
from megarl.data.datasets import check_pair, normalize_row, read_conversations, read_prompts
from megarl.data.table import read_rows

pytestmark = pytest.mark.alone

TEXT = (Path(__file__).resolve().parents[2] / "megarl/data/README.md").read_text()
ROWS = {
    kind: [json.loads(line) for line in block.splitlines()]
    for kind, block in re.findall(r"^```json (\w+)\n(.*?)^```", TEXT, re.M | re.S)
}
QUESTION, ANSWER = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}


def write(row: dict[str, Any], path: Path) -> Path:
    if path.suffix == ".jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    return path


def test_readme_has_rows_of_every_kind() -> None:
    assert {kind: len(rows) for kind, rows in ROWS.items()} == {
        "prompts": 3,
        "conversations": 4,
        "calls": 2,
        "pairs": 5,
    }


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("number", range(3))
def test_reads_readme_prompts(number: int, suffix: str, tmp_path: Path) -> None:
    (prompt,) = read_prompts(write(ROWS["prompts"][number], tmp_path / f"a.{suffix}"), order="level")
    assert prompt.messages == (QUESTION,) and prompt.ground_truth == "5" and prompt.id == "a-0"
    assert prompt.data_source == "math" and prompt.extra == {"level": 1}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("number", range(4))
def test_reads_readme_conversations(number: int, suffix: str, tmp_path: Path) -> None:
    path = write(ROWS["conversations"][number], tmp_path / f"a.{suffix}")
    ((location, row),) = read_rows(path)
    assert parse_conversation(row, location) == (QUESTION, ANSWER)
    assert len(read_conversations(path, None)) == 1


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("number", range(2))
def test_reads_readme_tool_calls(number: int, suffix: str, tmp_path: Path) -> None:
    ((location, row),) = read_rows(write(ROWS["calls"][number], tmp_path / f"a.{suffix}"))
    row = normalize_row(row, location, "prompt", "", "")
    question, call_message, observed, answer = row["messages"]
    (call,) = call_message["tool_calls"]
    assert question == QUESTION and call["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert observed == {"role": "tool", "content": "5"} and answer["content"] == "It is 5."
    assert row["tools"] == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("number", range(5))
def test_reads_readme_pairs(number: int, suffix: str, tmp_path: Path) -> None:
    ((location, row),) = read_rows(write(ROWS["pairs"][number], tmp_path / f"a.{suffix}"))
    worse = {"role": "assistant", "content": "6"}
    assert check_pair(row, location) == {"chosen": ((QUESTION, ANSWER), []), "rejected": ((QUESTION, worse), [])}
