"""Invalid prompts, conversations and preference pairs: files and rows."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from case import Case

Prepare = Callable[[Path], None]
PROMPT = {"prompt": "1+1?", "ground_truth": 2}
USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CONVERSATION = {"messages": [USER, ANSWER]}
PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
SFT = ("algorithm=sft", "data.train=FOLDER/own.jsonl")
PAIRS = ("algorithm=reward_model", "data.train=FOLDER/own.jsonl")
PROMPTS = ("data.train=FOLDER/own.jsonl",)


def write_file(content: bytes, name: str = "own.jsonl") -> Prepare:
    return lambda folder: None if (folder / name).write_bytes(content) else None


def third_row(valid: Any, invalid: Any) -> Prepare:
    """Write two valid rows and a bad one; rows given as text are written as Latin-1."""
    rows = [valid, valid, invalid]
    return write_file("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode("latin-1"))


def write_parquet(rows: list[dict[str, Any]]) -> Prepare:
    return lambda folder: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "own.parquet")


def bare_template(folder: Path) -> None:
    third_row(CONVERSATION, CONVERSATION)(folder)
    (folder / "model/chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")


def refusing_template(folder: Path) -> None:
    third_row(CONVERSATION, CONVERSATION)(folder)
    (folder / "model/chat_template.jinja").write_text("{{ raise_exception('never') }}")


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"


def truncated_parquet(folder: Path) -> None:
    write_parquet([PROMPT] * 100)(folder)
    content = (folder / "own.parquet").read_bytes()
    (folder / "own.parquet").write_bytes(content[: len(content) // 2])


def file_case(
    name: str, expected: tuple[str, ...], prepare: Prepare, file: str = "own.jsonl", key: str = "data.train"
) -> Case:
    return Case(name, expected, (f"{key}=FOLDER/{file}",), prepare)


def prompt(name: str, expected: tuple[str, ...], row: Any) -> Case:
    return Case(name, ("own.jsonl:3: ", *expected), PROMPTS, third_row(PROMPT, row))


def conversation(name: str, expected: tuple[str, ...], row: Any) -> Case:
    return Case(f"sft: {name}", ("own.jsonl:3", *expected), SFT, third_row(CONVERSATION, row))


def pair(name: str, expected: tuple[str, ...], row: Any) -> Case:
    return Case(f"pairs: {name}", ("own.jsonl:3", *expected), PAIRS, third_row(PAIR, row))


FILES = [
    file_case("no such file", ("data.train=FOLDER/none.jsonl", "no such file"), lambda folder: None, "none.jsonl"),
    file_case(
        "two files", ("data.train=", "no such file", "a list"), lambda folder: None, "train.jsonl,FOLDER/eval.jsonl"
    ),
    file_case("a pattern", ("data.train=", "no such file", "a list"), lambda folder: None, "tr*.jsonl"),
    file_case("a folder", ("FOLDER/model is a folder", "name a .parquet or .jsonl file"), lambda folder: None, "model"),
    file_case("a folder with the file's name", ("is a folder",), lambda folder: (folder / "own.jsonl").mkdir()),
    file_case("a file name that is too long", ("too long",), lambda folder: None, "x" * 300 + ".jsonl"),
    file_case("a pipe", ("not a regular file",), lambda folder: os.mkfifo(folder / "own.jsonl")),
    file_case("a device", ("not a regular file",), lambda folder: (folder / "own.jsonl").symlink_to("/dev/zero")),
    file_case("a dead link", ("no such file",), lambda folder: (folder / "own.jsonl").symlink_to("none")),
    file_case("csv", ("the suffix '.csv'", ".parquet or .jsonl"), write_file(b"a,b", "a.csv"), "a.csv"),
    file_case("json", ("the suffix '.json'", ".parquet or .jsonl"), write_file(b"[]", "a.json"), "a.json"),
    file_case("no suffix", ("the suffix ''", ".parquet or .jsonl"), write_file(b"", "a"), "a"),
    file_case(
        "a suffix of a compressed file",
        ("the suffix '.gz'",),
        write_file(gzip.compress(b"{}"), "a.jsonl.gz"),
        "a.jsonl.gz",
    ),
    file_case(
        "a compressed file without the suffix",
        ("own.jsonl", "gunzip"),
        write_file(gzip.compress(json.dumps(PROMPT).encode())),
    ),
    file_case("zip", ("own.jsonl", "unzip"), write_file(b"PK\x03\x04abc")),
    file_case("parquet called jsonl", ("own.jsonl", "suffix .parquet"), write_file(b"PAR1abc")),
    file_case(
        "jsonl called parquet", ("a.parquet cannot be read as parquet",), write_file(b"{}", "a.parquet"), "a.parquet"
    ),
    file_case("empty", ("own.jsonl holds no prompts",), write_file(b"")),
    file_case("blank lines", ("own.jsonl holds no prompts",), write_file(b"\n\r\n  \n")),
    file_case("only a BOM", ("own.jsonl holds no prompts",), write_file(b"\xef\xbb\xbf")),
    file_case("utf-16", ("own.jsonl", "UTF-16", "iconv"), write_file(json.dumps(PROMPT).encode("utf-16"))),
    file_case("utf-16 without a BOM", ("own.jsonl:1", "NUL"), write_file(json.dumps(PROMPT).encode("utf-16-be"))),
    file_case("utf-32", ("own.jsonl",), write_file(json.dumps(PROMPT).encode("utf-32"))),
    file_case("zeros", ("own.jsonl:1", "NUL"), write_file(bytes(1000))),
    file_case("random bytes", ("own.jsonl:1", "not UTF-8"), write_file(bytes(range(128, 256)))),
    file_case("one endless line", ("own.jsonl:1", "64 MiB"), write_file(b"x" * (65 << 20))),
    file_case("indented", ("own.jsonl:1", "one complete object"), write_file(json.dumps(PROMPT, indent=1).encode())),
    file_case("a list of rows", ("own.jsonl:1", "a list, not an object"), write_file(json.dumps([PROMPT]).encode())),
    file_case("truncated parquet", ("own.parquet cannot be read as parquet",), truncated_parquet, "own.parquet"),
    file_case(
        "parquet empty", ("own.parquet cannot be read as parquet",), write_file(b"", "own.parquet"), "own.parquet"
    ),
    file_case(
        "parquet with other columns",
        ("own.parquet, row 0: no 'prompt'", "question, answer", "data.prompt_key"),
        write_parquet([{"question": "x", "answer": "y"}]),
        "own.parquet",
    ),
    file_case("parquet without rows", ("no prompts",), lambda f: _no_rows(f / "own.parquet"), "own.parquet"),
    file_case(
        "parquet with a NaN label",
        ("own.parquet, row 1", "ground_truth", "empty"),
        write_parquet([{"prompt": "x", "ground_truth": 1.0}, {"prompt": "y", "ground_truth": float("nan")}]),
        "own.parquet",
    ),
    file_case(
        "parquet of numbers",
        ("own.parquet, row 0", "'prompt' must be text or a list"),
        write_parquet([{"prompt": 5, "ground_truth": 1}]),
        "own.parquet",
    ),
]


def _no_rows(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)


LINES = [
    prompt("latin-1", ("not UTF-8 at byte 12", "iconv"), '{"prompt": "é"}'),
    prompt("a truncated row", ("not JSON", "one complete object"), '{"prompt": "1+1'),
    prompt("Python's quotes", ("not JSON",), "{'prompt': '1+1?'}"),
    prompt("two rows on a line", ("not JSON: Extra data",), json.dumps(PROMPT) * 2),
    prompt("a number", ("a int, not an object",), "5"),
    prompt("null", ("a NoneType, not an object",), "null"),
    prompt("text", ("a str, not an object",), '"1+1?"'),
    prompt("deeply nested", ("nested too deeply",), '{"prompt": ' + "[" * 2000 + "]" * 2000 + "}"),
    prompt("nested", ("nested too deeply; 64",), PROMPT | {"x": json.loads("[" * 100 + "]" * 100)}),
    prompt("a huge number", ("4300 digits",), '{"prompt": "x", "ground_truth": 1' + "0" * 5000 + "}"),
    prompt("a duplicate key", ("has 'prompt' twice",), '{"prompt": "a", "prompt": "b", "ground_truth": 1}'),
    prompt("no prompt", ("no 'prompt'", "question", "data.prompt_key"), {"question": "x", "ground_truth": 1}),
    Case(
        "another column",
        ("own.jsonl:1: no 'q'", "data.prompt_key"),
        (*PROMPTS, "data.prompt_key=q"),
        third_row(PROMPT, PROMPT),
    ),
    prompt("prompt null", ("no 'prompt'", "empty"), {"prompt": None, "ground_truth": 1}),
    prompt("prompt without words", ("'prompt' is empty text",), {"prompt": " ", "ground_truth": 1}),
    prompt("prompt a number", ("must be text or a list of chat messages",), {"prompt": 5, "ground_truth": 1}),
    prompt("prompt an object", ("must be text or a list",), {"prompt": {"role": "user"}, "ground_truth": 1}),
    prompt("no messages", ("must be text or a list",), {"prompt": [], "ground_truth": 1}),
    prompt("a message as text", ("message 0 of 'prompt'",), {"prompt": ["x"], "ground_truth": 1}),
    prompt("content null", ("has no content",), {"prompt": [{"role": "user", "content": None}], "ground_truth": 1}),
    prompt("no content", ("has no content",), {"prompt": [{"role": "user"}], "ground_truth": 1}),
    prompt("content a number", ("must be text",), {"prompt": [{"role": "user", "content": 1}], "ground_truth": 1}),
    prompt("no role", ("not a message with role",), {"prompt": [{"content": "x"}], "ground_truth": 1}),
    prompt("an unknown role", ("'human'", "roles are"), {"prompt": [{"role": "human", "content": "x"}], "label": 1}),
    prompt("sharegpt", ("not a message with role",), {"prompt": [{"from": "human", "value": "x"}], "label": 1}),
    prompt("a missing image", ("'images'", "cannot read"), {"prompt": "x", "label": 1, "images": [{"path": "a.png"}]}),
    prompt("a column of videos", ("'videos'", "only text"), {"prompt": "x", "label": 1, "videos": [{"path": "a.mp4"}]}),
    prompt(
        "no image", ("'image_url'", "'images'"), {"prompt": [USER | {"content": [{"type": "image_url"}]}], "label": 1}
    ),
    prompt(
        "a content part without text", ("the part",), {"prompt": [USER | {"content": [{"type": "text"}]}], "label": 1}
    ),
    prompt("ends with an answer", ("nothing to answer",), {"prompt": [USER, ANSWER], "ground_truth": 1}),
    prompt("ground truth null", ("no 'ground_truth'", "data.label_key"), {"prompt": "x", "ground_truth": None}),
    prompt("ground truth NaN", ("no 'ground_truth'", "empty"), '{"prompt": "x", "ground_truth": NaN}'),
    prompt("no ground truth", ("no 'ground_truth'", "data.label_key"), {"prompt": "x"}),
    prompt(
        "verl's null ground truth",
        ("reward_model.ground_truth is empty",),
        {"prompt": "x", "reward_model": {"ground_truth": None}},
    ),
    prompt("an id as a list", ("'id' must be text or a number",), PROMPT | {"id": [1]}),
    prompt("an id of true", ("'id' must be text or a number",), PROMPT | {"id": True}),
    prompt("a data source as an object", ("'data_source' must be text",), PROMPT | {"data_source": {}}),
    prompt("a tool without a name", ("neither a name nor a tool schema",), PROMPT | {"tools": [{}]}),
    prompt("a tool as a number", ("neither a name nor a tool schema",), PROMPT | {"tools": 5}),
    prompt("a function as text", ("neither a name",), PROMPT | {"tools": [{"function": "calculator"}]}),
    prompt("a duplicate tool", ("'tools' has 'calculator' twice",), PROMPT | {"tools": ["calculator"] * 2}),
    Case(
        "a duplicate id",
        ("own.jsonl:2", "'x'", "own.jsonl:1"),
        PROMPTS,
        write_file(2 * (json.dumps(PROMPT | {"id": "x"}) + "\n").encode()),
    ),
    Case(
        "the same id as text and as a number",
        ("the id '1'",),
        PROMPTS,
        third_row(PROMPT | {"id": "1"}, PROMPT | {"id": 1}),
    ),
    Case(
        "a tool that is not loaded",
        ("the tool abacus", "rollout.tools"),
        PROMPTS,
        third_row(PROMPT, PROMPT | {"id": "3", "tools": ["abacus"]}),
    ),
    Case(
        "prompts that are all too long",
        ("all 3 prompts are longer", "rollout.max_context"),
        PROMPTS,
        third_row(*[{"prompt": "1+" * 500, "ground_truth": 1}] * 2),
    ),
    Case("eval without a file", ("run.eval_every=1", "data.eval"), ("run.eval_every=1",)),
    Case("no file to evaluate on", ("data.eval=FOLDER/n.jsonl",), ("run.eval_every=1", "data.eval=FOLDER/n.jsonl")),
    Case(
        "a bad line to evaluate on",
        ("own.jsonl:3: no 'prompt'",),
        ("run.eval_every=1", "data.eval=FOLDER/own.jsonl"),
        third_row(PROMPT, {"x": 1}),
    ),
    Case("no training data", ("data.train is not set",), ("data.train=",)),
]

CONVERSATIONS = [
    conversation("no messages", ("has no conversation", "prompt, ground_truth", "data.label_key"), PROMPT),
    conversation("messages null", ("has no conversation", "columns here: none"), {"messages": None}),
    conversation(
        "an unknown ShareGPT sender",
        ("message 0 of 'conversations' is from 'alien'",),
        {"conversations": [{"from": "alien"}]},
    ),
    conversation("sharegpt in messages", ("not a message with role",), {"messages": [{"from": "human", "value": "x"}]}),
    conversation("a response as a number", ("'response' must be text",), {"prompt": "x", "response": 5}),
    conversation("messages as text", ("has no list `messages`",), {"messages": "hi"}),
    conversation("an empty message list", ("must be text or a list",), {"messages": []}),
    conversation("only a prompt", ("end with the assistant's",), {"messages": [USER]}),
    conversation("only an answer", ("begin with a prompt",), {"messages": [ANSWER]}),
    conversation("ends with a question", ("end with the assistant's",), {"messages": [USER, ANSWER, USER]}),
    conversation("a null message", ("message 1 of 'messages'",), {"messages": [USER, None, ANSWER]}),
    conversation("an answer without content", ("message 1", "no content"), {"messages": [USER, {"role": "assistant"}]}),
    conversation("content null", ("message 1", "no content"), {"messages": [USER, ANSWER | {"content": None}]}),
    conversation("an empty answer", ("message 1", "is empty"), {"messages": [USER, ANSWER | {"content": ""}]}),
    conversation("an answer of blanks", ("message 1", "is empty"), {"messages": [USER, ANSWER | {"content": "\n"}]}),
    conversation("an empty question", ("message 0", "no content"), {"messages": [USER | {"content": ""}, ANSWER]}),
    conversation(
        "an unknown role", ("'gpt'", "roles are"), {"messages": [USER, {"role": "gpt", "content": "2"}, ANSWER]}
    ),
    conversation("role null", ("not a message with role",), {"messages": [USER | {"role": None}, ANSWER]}),
    conversation(
        "no image", ("'image_url'", "'images'"), {"messages": [USER | {"content": [{"type": "image_url"}]}, ANSWER]}
    ),
    conversation("content an object", ("must be text",), {"messages": [USER, ANSWER | {"content": {"text": "2"}}]}),
    conversation("tool calls as text", ("calls",), {"messages": [USER, ANSWER | {"tool_calls": "f()"}, ANSWER]}),
    conversation(
        "a call without a function", ("calls",), {"messages": [USER, ANSWER | {"tool_calls": [{"name": "f"}]}, ANSWER]}
    ),
    conversation(
        "a user message with tool calls",
        ("only the assistant calls tools",),
        {"messages": [USER | {"tool_calls": [CALL]}, ANSWER]},
    ),
    conversation("a tool as a name", ("'tools' holds 'f'", "schema"), CONVERSATION | {"tools": ["f"]}),
    conversation(
        "a tool without a name", ("'tools'", "schema"), CONVERSATION | {"tools": [{"type": "function", "function": {}}]}
    ),
    conversation("a null tool", ("'tools'", "schema"), CONVERSATION | {"tools": [None]}),
    conversation("tools as a number", ("'tools' holds '5'",), CONVERSATION | {"tools": 5}),
    conversation("parameters as text", ("parameters",), CONVERSATION | {"tools": [{"name": "f", "parameters": "x"}]}),
    conversation("not JSON", ("not JSON",), "{"),
    conversation("latin-1", ("not UTF-8",), '{"messages": "é"}'),
    Case("sft: a template without an end of turn", ("model.path: the chat", "<|im_end|>"), SFT, bare_template),
    Case(
        "sft: a template that refuses every conversation",
        ("model.path: the chat", "never", "any conversation"),
        SFT,
        refusing_template,
    ),
    file_case("a pointer of Git LFS", ("own.jsonl is a pointer of Git LFS", "git lfs pull"), write_file(LFS_POINTER)),
    file_case(
        "a pointer of Git LFS for parquet",
        ("own.parquet is a pointer of Git LFS",),
        write_file(LFS_POINTER, "own.parquet"),
        "own.parquet",
    ),
    Case("sft: empty", ("holds no conversation",), SFT, write_file(b"\n")),
    Case("sft: prompts for conversations", ("train.jsonl:1", "`messages`"), ("algorithm=sft",)),
    Case("sft: no data", ("data.train is not set", "conversations"), ("algorithm=sft", "data.train=")),
    Case(
        "sft: eval without a file",
        ("data.eval", "conversations"),
        ("run.eval_every=1", *SFT),
        third_row(CONVERSATION, CONVERSATION),
    ),
    Case(
        "sft: a bad line to evaluate on",
        ("sft2.jsonl:1", "`messages`"),
        ("algorithm=sft", "data.train=FOLDER/sft.jsonl", "run.eval_every=1", "data.eval=FOLDER/sft2.jsonl"),
        write_file(b"{}", "sft2.jsonl"),
    ),
    Case(
        "sft: all conversations beyond the model's context",
        ("3 of 3 conversations", "2048 positions", "the shortest has"),
        SFT,
        third_row(*[{"messages": [USER | {"content": "1+" * 2000}, ANSWER]}] * 2),
    ),
    Case(
        "sft: parquet with other columns",
        ("own.parquet, row 0", "`messages`"),
        ("algorithm=sft", "data.train=FOLDER/own.parquet"),
        write_parquet([PROMPT]),
    ),
]

PREFERENCES = [
    pair("no rejected", ("no 'rejected'", "columns here"), {"prompt": "x", "chosen": "y"}),
    pair("chosen null", ("no 'chosen'",), PAIR | {"chosen": None}),
    pair("no prompt", ("no 'prompt'",), {"chosen": "2", "rejected": "3"}),
    pair("prompt without words", ("'prompt' is empty",), PAIR | {"prompt": ""}),
    pair("an answer as a number", ("'rejected' must be text or a list",), PAIR | {"rejected": 3}),
    pair("an answer without content", ("no content",), PAIR | {"chosen": [{"role": "assistant"}]}),
    pair("an answer by the user", ("begins neither",), PAIR | {"chosen": [USER | {"content": "x"}]}),
    pair(
        "two prompts", ("begin differently",), {"chosen": [USER, ANSWER], "rejected": [USER | {"content": "x"}, ANSWER]}
    ),
    pair(
        "ends with a question",
        ("must end with the assistant's",),
        {"chosen": [USER, ANSWER, USER], "rejected": [USER, ANSWER]},
    ),
    pair("an unknown role", ("'gpt'",), PAIR | {"chosen": [{"role": "gpt", "content": "x"}]}),
    pair(
        "an image for a model of text",
        ("no vision tower",),
        {"prompt": "<image>?", "images": [{"bytes": "AAAA"}], "chosen": "2", "rejected": "3"},
    ),
    pair("no image", ("'image_url'",), PAIR | {"chosen": [ANSWER | {"content": [{"type": "image_url"}]}]}),
    Case("pairs: empty", ("holds no pair",), PAIRS, write_file(b"")),
    Case("pairs: the same answers", ("own.jsonl:3", "the same"), PAIRS, third_row(PAIR, PAIR | {"rejected": "2"})),
    Case("pairs: a tool without a name", ("own.jsonl:3", "schema"), PAIRS, third_row(PAIR, PAIR | {"tools": [{}]})),
    Case(
        "pairs: all too long",
        ("all 3 pairs are too long", "train.max_tokens_per_gpu"),
        PAIRS,
        third_row(*[PAIR | {"prompt": "1+" * 2000}] * 2),
    ),
]

TWO = "data.train=[FOLDER/train.jsonl,FOLDER/own.jsonl]"
LEVELS = [PROMPT | {"level": 1}, PROMPT | {"level": None}]

SEVERAL = [
    Case("one of two files is missing", ("data.train=FOLDER/own.jsonl", "no such file"), (TWO,)),
    Case("a bad line in the second file", ("own.jsonl:3: ", "no 'prompt'"), (TWO,), third_row(PROMPT, {"x": 1})),
    Case("the second file is empty", ("own.jsonl holds no prompts",), (TWO,), write_file(b"")),
    Case(
        "a column missing in one of two files",
        ("own.jsonl:1: no 'ground_truth'", "columns here: prompt, answer", "data.label_key"),
        (TWO,),
        third_row({"prompt": "x", "answer": 1}, {"prompt": "x", "answer": 2}),
    ),
    Case(
        "a file twice", ("named twice", "data.mixture_weights"), ("data.train=[FOLDER/train.jsonl,FOLDER/train.jsonl]",)
    ),
    Case(
        "more weights than files",
        ("data.mixture_weights has 3 numbers", "2 files", "one for each"),
        (TWO, "data.mixture_weights=[1,1,1]"),
        third_row(PROMPT, PROMPT),
    ),
    Case(
        "weights for one file",
        ("data.mixture_weights has 2 numbers", "1 files"),
        (*PROMPTS, "data.mixture_weights=[1,1]"),
    ),
    Case(
        "a weight of zero",
        ("data.mixture_weights[1] must be a number, above 0", "not 0"),
        (TWO, "data.mixture_weights=[1,0]"),
    ),
    Case(
        "a weight below zero",
        ("data.mixture_weights[0] must be a number, above 0",),
        (TWO, "data.mixture_weights=[-1,2]"),
    ),
    Case("a weight as text", ("data.mixture_weights[1] must be a number",), (TWO, "data.mixture_weights=[1,much]")),
    Case("weights as a scalar", ("data.mixture_weights must be a list",), (TWO, "data.mixture_weights=3")),
    Case(
        "a weight too small to count",
        ("data.mixture_weights", "1e-05", "less than one prompt in 10000", "raise it"),
        (TWO, "data.mixture_weights=[1,0.00001]"),
        third_row(PROMPT, PROMPT),
    ),
    Case(
        "a curriculum key with text values",
        ("own.jsonl:3: 'level' is 'hard'", "not a number"),
        (*PROMPTS, "data.curriculum_key=level"),
        third_row(LEVELS[0], PROMPT | {"level": "hard"}),
    ),
    Case(
        "a curriculum key that no row has",
        ("data.curriculum_key=depth", "no row of FOLDER/own.jsonl"),
        (*PROMPTS, "data.curriculum_key=depth"),
        third_row(*LEVELS),
    ),
    Case(
        "sft: a curriculum key with text values",
        ("own.jsonl:3: 'level' is 'hard'", "not a number"),
        (*SFT, "data.curriculum_key=level"),
        third_row(CONVERSATION | {"level": 1}, CONVERSATION | {"level": "hard"}),
    ),
    Case(
        "pairs: a curriculum key with text values",
        ("own.jsonl:3: 'level' is 'hard'", "not a number"),
        (*PAIRS, "data.curriculum_key=level"),
        third_row(PAIR | {"level": 1}, PAIR | {"level": "hard"}),
    ),
]

CASES = [*SEVERAL, *FILES, *LINES, *CONVERSATIONS, *PREFERENCES]
