"""Make verl-style parquet of GSM8K: .venv/bin/python tools/prepare_gsm8k.py SRC OUT

SRC is a folder with train and test as .jsonl or .parquet files of `question` and `answer`, as in
https://github.com/openai/grade-school-math and in the data set openai/gsm8k. Writes OUT/train.parquet and
OUT/test.parquet, both or, where anything is wrong, neither.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megarl.command_line import Parser, ends_in_a_line, folder_to_write
from megarl.config import ConfigError
from megarl.data.rows import read_rows

INSTRUCTION = ' Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")


def find_split(source: Path, split: str) -> Path:
    """The file of a split; ConfigError where there is none or more than one."""
    if not source.is_dir():
        raise ConfigError(f"there is no folder {source}; name one with train and test of GSM8K")
    names = (f"{split}.jsonl", f"{split}.parquet", f"{split}-00000-of-00001.parquet")
    found = [source / name for name in names if (source / name).is_file()]
    if len(found) != 1:
        problem = " and ".join(file.name for file in found) if found else "none"
        raise ConfigError(f"{source} must have one of {', '.join(names)}; it has {problem}")
    return found[0]


def convert(rows: Iterable[tuple[str, dict[str, Any]]], split: str) -> list[dict[str, Any]]:
    """Rows with verl's columns; ConfigError for a row that is no GSM8K problem."""
    converted = []
    for index, (where, row) in enumerate(rows):
        for key in ("question", "answer"):
            if not isinstance(row.get(key), str):
                raise ConfigError(f"{where}: no text {key!r}; a row of GSM8K has question and answer")
        question, answer = row["question"], row["answer"]
        _, marker, result = answer.rpartition("####")
        result = result.strip().replace(",", "")
        if not marker or not result:
            raise ConfigError(f"{where}: the answer does not end in '#### <result>'")
        converted.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": question + INSTRUCTION}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": result},
                "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
            }
        )
    return converted


def prepare(source: Path, target: Path) -> dict[str, int]:
    """Convert both splits; the number of problems in each. Raises ConfigError or OSError and then leaves nothing."""
    folder_to_write(target, "OUT")
    tables = {}
    for split in SPLITS:
        file = find_split(source, split)
        rows = convert(read_rows(file), split)
        if not rows:
            raise ConfigError(f"{file} holds no problems")
        tables[split] = pyarrow.Table.from_pylist(rows)
    target.mkdir(parents=True, exist_ok=True)
    unfinished = {split: target / f".{split}.parquet.{os.getpid()}" for split in SPLITS}
    try:
        for split, file in unfinished.items():
            pyarrow.parquet.write_table(tables[split], file)
        for split, file in unfinished.items():
            file.replace(target / f"{split}.parquet")
    finally:
        for file in unfinished.values():
            file.unlink(missing_ok=True)
    return {split: table.num_rows for split, table in tables.items()}


def convert_all() -> int:
    parser = Parser(__doc__)
    parser.add_argument("source", metavar="SRC", type=Path, help="folder with train and test, .jsonl or .parquet")
    parser.add_argument("target", metavar="OUT", type=Path, help="folder for train.parquet and test.parquet")
    options = parser.parse_args()
    for split, count in prepare(options.source, options.target).items():
        print(f"{options.target / split}.parquet: {count} problems")
    return 0


if __name__ == "__main__":
    sys.exit(ends_in_a_line(convert_all))
