"""Convert local files of a published data set to verl-style parquet.

    .venv/bin/python tools/prepare_data.py gsm8k|math500|aime|humaneval SOURCE OUT

NAME        SOURCE, as published                                                      reward, by the data source
gsm8k       folder with train and test: `question`, `answer` (openai/gsm8k)           gsm8k
math500     file: `problem`, `answer` (HuggingFaceH4/MATH-500)                        math_verify
aime        file: `problem` or `question`, `answer` (HuggingFaceH4/aime_2024 ...)     math_dapo
humaneval   file: `prompt`, `test`, `entry_point` (openai/openai_humaneval)           hidden_tests

Files are .jsonl, .json (a list) or .parquet; a folder with a single file stands for the file. Writes OUT/test.parquet,
and OUT/train.parquet for gsm8k; on any error, writes nothing. Every ground truth is checked the way that the reward
reads it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megarl.config import ConfigError
from megarl.config.command_line import Parser, check_writable_folder, run_cli
from megarl.data.table import read_rows
from megarl.rewards.by_source import by_source
from megarl.types import Prompt

Row = dict[str, Any]

STEPS = ' Let\'s think step by step and output the final answer after "####".'
BOXED = "\n\nReason step by step, and put the final answer within \\boxed{}."
ANSWER_FORMAT = '\n\nReason step by step. The last line is to be "Answer: N", with the result alone for N.'
COMPLETE = (
    "Complete this function. Answer with the whole of it, with its imports, in one block of Python.\n\n```python\n"
)
LARGEST = 256 << 20
"""Maximum bytes of a .json file, which is read as a whole."""


@dataclass(frozen=True)
class ConvertedRow:
    """A converted row; the reward compares with `truth`."""

    source: str
    text: str
    truth: Any
    ability: str
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Adapter:
    """A data set: its splits, and the conversion of a row, which raises ValueError for a row of another format."""

    convert_row: Callable[[Row], ConvertedRow]
    splits: tuple[str, ...] = ("test",)


def convert_gsm8k(row: Row) -> ConvertedRow:
    """Convert a row of GSM8K (Cobbe et al., arXiv:2110.14168): the answer ends in `#### <result>`."""
    question, answer = _text(row, "question", dataset="GSM8K"), _text(row, "answer", dataset="GSM8K")
    _, marker, result = answer.rpartition("####")
    result = result.strip().replace(",", "")
    if not marker or not result:
        raise ValueError("the answer does not end in '#### <result>'")
    return ConvertedRow("openai/gsm8k", question + STEPS, result, "math", {"answer": answer, "question": question})


def convert_math500(row: Row) -> ConvertedRow:
    """Convert a row of MATH-500: the 500 problems of MATH (arXiv:2103.03874) that Lightman et al., arXiv:2305.20050,
    held out."""
    problem, truth = _text(row, "problem", dataset="MATH-500"), _truth(row, "MATH-500")
    extra = {name: row[name] for name in ("subject", "level", "unique_id") if row.get(name) is not None}
    return ConvertedRow("HuggingFaceH4/MATH-500", problem + BOXED, truth, "math", extra)


def convert_aime(row: Row) -> ConvertedRow:
    """Convert a problem of the American Invitational Mathematics Examination; its result is an integer up to 999."""
    row = {name.lower(): value for name, value in row.items()}  # some files have ID, Problem, Answer
    problem, truth = _text(row, "problem", "question", dataset="AIME"), _truth(row, "AIME")
    if not (truth.isascii() and truth.isdigit() and int(truth) <= 999):
        raise ValueError(f"the answer {truth[:40]!r} is no whole number from 0 to 999")
    year = str(row.get("year") or "")
    extra = {name: str(row[name]) for name in ("id", "url", "year") if row.get(name) is not None}
    return ConvertedRow(
        f"aime{year}" if year.isdigit() else "aime", problem + ANSWER_FORMAT, str(int(truth)), "math", extra
    )


def convert_humaneval(row: Row) -> ConvertedRow:
    """Convert a row of HumanEval (Chen et al., arXiv:2107.03374)."""
    prompt, test, entry = (_text(row, name, dataset="HumanEval") for name in ("prompt", "test", "entry_point"))
    truth = json.dumps({"prompt": prompt, "test": test, "entry_point": entry})
    extra = {"task_id": str(row.get("task_id") or ""), "entry_point": entry}
    return ConvertedRow("openai/openai_humaneval", f"{COMPLETE}{prompt.rstrip()}\n```", truth, "code", extra)


ADAPTERS = {
    "gsm8k": Adapter(convert_gsm8k, ("train", "test")),
    "math500": Adapter(convert_math500),
    "aime": Adapter(convert_aime),
    "humaneval": Adapter(convert_humaneval),
}


def _text(row: Row, *names: str, dataset: str) -> str:
    """Return the first of these columns that is a string."""
    for name in names:
        if isinstance(row.get(name), str) and row[name].strip():
            text: str = row[name]
            return text
    has = ", ".join(sorted(map(str, row)))[:200] or "none"
    raise ValueError(f"no text {' or '.join(map(repr, names))}, which a row of {dataset} has; its columns: {has}")


def _truth(row: Row, dataset: str) -> str:
    truth = row.get("answer")
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        truth = f"{truth:g}"
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError(f"no ground truth: 'answer' is {truth!r}; a row of {dataset} has one")
    return truth.strip()


# --- files ----------------------------------------------------------------------------------------------------------


def find_split(source: Path, split: str) -> Path:
    """Return the file of a split. Raises ConfigError if there is none, or more than one."""
    if not source.is_dir():
        raise ConfigError(f"no folder {source}; name one with train and test, as published")
    names = [f"{split}{suffix}" for suffix in (".jsonl", ".json", ".parquet", "-00000-of-00001.parquet")]
    files = [source / name for name in names if (source / name).is_file()]
    if len(files) != 1:
        problem = " and ".join(file.name for file in files) if files else "none"
        raise ConfigError(f"{source} must have one of {', '.join(names)}; it has {problem}")
    return files[0]


def find_file(source: Path) -> Path:
    """Return the file itself, or the folder's only data file."""
    if not source.is_dir():
        if not source.exists():
            raise ConfigError(f"there is no file {source}; name a .jsonl, .json or .parquet file as published")
        return source
    files = sorted(file for file in source.iterdir() if file.suffix.lower() in (".jsonl", ".json", ".parquet"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:8]) or "none"
        raise ConfigError(f"{source} must have one .jsonl, .json or .parquet file; it has {names}: name the file")
    return files[0]


def iter_rows(file: Path) -> Iterable[tuple[str, Row]]:
    """Return (where, row) of each row of a file. Raises ConfigError."""
    return _read_json_list(file) if file.suffix.lower() == ".json" else read_rows(file)


def _read_json_list(file: Path) -> Iterator[tuple[str, Row]]:
    if file.stat().st_size > LARGEST:
        raise ConfigError(f"{file} has more than {LARGEST >> 20} MiB; make it .jsonl, a row a line")
    try:
        rows = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {str(error)[:200]}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"{file} holds a {type(rows).__name__}, not a list of rows")
    for number, row in enumerate(rows):
        location = f"{file}, row {number}"
        if not isinstance(row, dict):
            raise ConfigError(f"{location}: a {type(row).__name__}, not an object of named columns")
        yield location, row


def convert(rows: Iterable[tuple[str, Row]], adapter: Adapter, split: str) -> list[Row]:
    """Return rows with verl's columns. Raises ConfigError for a row of another format, or with an unusable ground
    truth."""
    converted = []
    for index, (location, row) in enumerate(rows):
        try:
            record = adapter.convert_row(row)
            messages = [{"role": "user", "content": record.text}]
            by_source.check(Prompt(str(index), tuple(messages), data_source=record.source, ground_truth=record.truth))
        except ValueError as error:
            raise ConfigError(f"{location}: {error}") from None
        extra: Row = {"split": split, "index": index, **record.extra}
        converted.append(
            {
                "data_source": record.source,
                "prompt": messages,
                "ability": record.ability,
                "reward_model": {"style": "rule", "ground_truth": record.truth},
                "extra_info": extra,
            }
        )
    return converted


def prepare(name: str, source: Path, target: Path) -> dict[str, int]:
    """Convert all splits. Return the number of problems in each. On ConfigError or OSError, nothing is written."""
    check_writable_folder(target, "OUT")
    adapter, tables = ADAPTERS[name], {}
    for split in adapter.splits:
        file = find_split(source, split) if len(adapter.splits) > 1 else find_file(source)
        rows = convert(iter_rows(file), adapter, split)
        if not rows:
            raise ConfigError(f"{file} holds no problems")
        tables[split] = pyarrow.Table.from_pylist(rows)
    target.mkdir(parents=True, exist_ok=True)
    unfinished = {split: target / f".{split}.parquet.{os.getpid()}" for split in tables}
    try:
        for split, file in unfinished.items():
            pyarrow.parquet.write_table(tables[split], file.absolute())
        for split, file in unfinished.items():
            file.replace(target / f"{split}.parquet")
    finally:
        for file in unfinished.values():
            file.unlink(missing_ok=True)
    return {split: table.num_rows for split, table in tables.items()}


def convert_all() -> int:
    parser = Parser(__doc__)
    parser.add_argument("name", metavar="NAME", choices=ADAPTERS, help="gsm8k, math500, aime or humaneval")
    parser.add_argument("source", metavar="SOURCE", type=Path, help="file or folder, .jsonl, .json or .parquet")
    parser.add_argument("target", metavar="OUT", type=Path, help="folder for train.parquet and test.parquet")
    options = parser.parse_args()
    for split, count in prepare(options.name, options.source, options.target).items():
        print(f"{options.target / split}.parquet: {count} problems")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(convert_all))
