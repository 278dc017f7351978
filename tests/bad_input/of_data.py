"""Prompts, conversations and pairs that are not what they should be, as files and line by line."""

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
TALK = {"messages": [USER, ANSWER]}
PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
SFT = ("algorithm=sft", "data.train=FOLDER/own.jsonl")
PAIRS = ("algorithm=reward_model", "data.train=FOLDER/own.jsonl")
PROMPTS = ("data.train=FOLDER/own.jsonl",)


def holds(content: bytes, name: str = "own.jsonl") -> Prepare:
    return lambda folder: None if (folder / name).write_bytes(content) else None


def third(good: Any, bad: Any) -> Prepare:
    """Two good rows and a bad one, which may be given as text, in Latin-1."""
    rows = [good, good, bad]
    return holds("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode("latin-1"))


def parquet(rows: list[dict[str, Any]]) -> Prepare:
    return lambda folder: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "own.parquet")


def bare_template(folder: Path) -> None:
    third(TALK, TALK)(folder)
    (folder / "model/chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")


def refusing_template(folder: Path) -> None:
    third(TALK, TALK)(folder)
    (folder / "model/chat_template.jinja").write_text("{{ raise_exception('never') }}")


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"


def cut_parquet(folder: Path) -> None:
    parquet([PROMPT] * 100)(folder)
    full = (folder / "own.parquet").read_bytes()
    (folder / "own.parquet").write_bytes(full[: len(full) // 2])


def of_file(
    name: str, says: tuple[str, ...], prepare: Prepare, file: str = "own.jsonl", key: str = "data.train"
) -> Case:
    return Case(name, says, (f"{key}=FOLDER/{file}",), prepare)


def prompt(name: str, says: tuple[str, ...], row: Any) -> Case:
    return Case(name, ("own.jsonl:3: ", *says), PROMPTS, third(PROMPT, row))


def talk(name: str, says: tuple[str, ...], row: Any) -> Case:
    return Case(f"sft: {name}", ("own.jsonl:3", *says), SFT, third(TALK, row))


def pair(name: str, says: tuple[str, ...], row: Any) -> Case:
    return Case(f"pairs: {name}", ("own.jsonl:3", *says), PAIRS, third(PAIR, row))


FILES = [
    of_file("no such file", ("data.train=FOLDER/none.jsonl", "no such file"), lambda folder: None, "none.jsonl"),
    of_file(
        "two files", ("data.train=", "no such file", "a list"), lambda folder: None, "train.jsonl,FOLDER/eval.jsonl"
    ),
    of_file("a pattern", ("data.train=", "no such file", "a list"), lambda folder: None, "tr*.jsonl"),
    of_file("a folder", ("FOLDER/model is a folder", "name a .parquet or .jsonl file"), lambda folder: None, "model"),
    of_file("a folder of that name", ("is a folder",), lambda folder: (folder / "own.jsonl").mkdir()),
    of_file("a name too long", ("too long",), lambda folder: None, "x" * 300 + ".jsonl"),
    of_file("a pipe", ("not a regular file",), lambda folder: os.mkfifo(folder / "own.jsonl")),
    of_file("a device", ("not a regular file",), lambda folder: (folder / "own.jsonl").symlink_to("/dev/zero")),
    of_file("a link to nothing", ("no such file",), lambda folder: (folder / "own.jsonl").symlink_to("none")),
    of_file("csv", ("the suffix '.csv'", ".parquet or .jsonl"), holds(b"a,b", "a.csv"), "a.csv"),
    of_file("json", ("the suffix '.json'", ".parquet or .jsonl"), holds(b"[]", "a.json"), "a.json"),
    of_file("no suffix", ("the suffix ''", ".parquet or .jsonl"), holds(b"", "a"), "a"),
    of_file("compressed by its name", ("the suffix '.gz'",), holds(gzip.compress(b"{}"), "a.jsonl.gz"), "a.jsonl.gz"),
    of_file("compressed in fact", ("own.jsonl", "gunzip"), holds(gzip.compress(json.dumps(PROMPT).encode()))),
    of_file("zip", ("own.jsonl", "unzip"), holds(b"PK\x03\x04abc")),
    of_file("parquet called jsonl", ("own.jsonl", "suffix .parquet"), holds(b"PAR1abc")),
    of_file("jsonl called parquet", ("a.parquet cannot be read as parquet",), holds(b"{}", "a.parquet"), "a.parquet"),
    of_file("empty", ("own.jsonl holds no prompts",), holds(b"")),
    of_file("blank lines", ("own.jsonl holds no prompts",), holds(b"\n\r\n  \n")),
    of_file("only a byte order mark", ("own.jsonl holds no prompts",), holds(b"\xef\xbb\xbf")),
    of_file("utf-16", ("own.jsonl", "UTF-16", "iconv"), holds(json.dumps(PROMPT).encode("utf-16"))),
    of_file("utf-16 without a mark", ("own.jsonl:1", "NUL"), holds(json.dumps(PROMPT).encode("utf-16-be"))),
    of_file("utf-32", ("own.jsonl",), holds(json.dumps(PROMPT).encode("utf-32"))),
    of_file("zeros", ("own.jsonl:1", "NUL"), holds(bytes(1000))),
    of_file("random bytes", ("own.jsonl:1", "not UTF-8"), holds(bytes(range(128, 256)))),
    of_file("one line without end", ("own.jsonl:1", "64 MiB"), holds(b"x" * (65 << 20))),
    of_file("indented", ("own.jsonl:1", "one complete object"), holds(json.dumps(PROMPT, indent=1).encode())),
    of_file("a list of rows", ("own.jsonl:1", "a list, not an object"), holds(json.dumps([PROMPT]).encode())),
    of_file("parquet cut off", ("own.parquet cannot be read as parquet",), cut_parquet, "own.parquet"),
    of_file("parquet empty", ("own.parquet cannot be read as parquet",), holds(b"", "own.parquet"), "own.parquet"),
    of_file(
        "parquet of other columns",
        ("own.parquet, row 0: no 'prompt'", "question, answer", "data.prompt_key"),
        parquet([{"question": "x", "answer": "y"}]),
        "own.parquet",
    ),
    of_file("parquet without rows", ("no prompts",), lambda f: _no_rows(f / "own.parquet"), "own.parquet"),
    of_file(
        "parquet with NaN for a label",
        ("own.parquet, row 1", "ground_truth", "empty"),
        parquet([{"prompt": "x", "ground_truth": 1.0}, {"prompt": "y", "ground_truth": float("nan")}]),
        "own.parquet",
    ),
    of_file(
        "parquet of numbers",
        ("own.parquet, row 0", "'prompt' must be text or a list"),
        parquet([{"prompt": 5, "ground_truth": 1}]),
        "own.parquet",
    ),
]


def _no_rows(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)


LINES = [
    prompt("latin-1", ("not UTF-8 at byte 12", "iconv"), '{"prompt": "é"}'),
    prompt("cut off", ("not JSON", "one complete object"), '{"prompt": "1+1'),
    prompt("python's quotes", ("not JSON",), "{'prompt': '1+1?'}"),
    prompt("two on a line", ("not JSON: Extra data",), json.dumps(PROMPT) * 2),
    prompt("a number", ("a int, not an object",), "5"),
    prompt("null", ("a NoneType, not an object",), "null"),
    prompt("text", ("a str, not an object",), '"1+1?"'),
    prompt("nested deeply", ("nested too deeply",), '{"prompt": ' + "[" * 2000 + "]" * 2000 + "}"),
    prompt("nested", ("nested too deeply; 64",), PROMPT | {"x": json.loads("[" * 100 + "]" * 100)}),
    prompt("a huge number", ("4300 digits",), '{"prompt": "x", "ground_truth": 1' + "0" * 5000 + "}"),
    prompt("a key twice", ("has 'prompt' twice",), '{"prompt": "a", "prompt": "b", "ground_truth": 1}'),
    prompt("no prompt", ("no 'prompt'", "question", "data.prompt_key"), {"question": "x", "ground_truth": 1}),
    Case(
        "another column",
        ("own.jsonl:1: no 'q'", "data.prompt_key"),
        (*PROMPTS, "data.prompt_key=q"),
        third(PROMPT, PROMPT),
    ),
    prompt("prompt null", ("no 'prompt'", "empty"), {"prompt": None, "ground_truth": 1}),
    prompt("prompt without words", ("'prompt' is empty text",), {"prompt": " ", "ground_truth": 1}),
    prompt("prompt a number", ("must be text or a list of chat messages",), {"prompt": 5, "ground_truth": 1}),
    prompt("prompt an object", ("must be text or a list",), {"prompt": {"role": "user"}, "ground_truth": 1}),
    prompt("no messages", ("must be text or a list",), {"prompt": [], "ground_truth": 1}),
    prompt("a message that is text", ("message 0 of 'prompt'",), {"prompt": ["x"], "ground_truth": 1}),
    prompt("content null", ("has no content",), {"prompt": [{"role": "user", "content": None}], "ground_truth": 1}),
    prompt("no content", ("has no content",), {"prompt": [{"role": "user"}], "ground_truth": 1}),
    prompt("content a number", ("must be text",), {"prompt": [{"role": "user", "content": 1}], "ground_truth": 1}),
    prompt("no role", ("not a message with role",), {"prompt": [{"content": "x"}], "ground_truth": 1}),
    prompt("a foreign role", ("'human'", "roles are"), {"prompt": [{"role": "human", "content": "x"}], "label": 1}),
    prompt("sharegpt", ("not a message with role",), {"prompt": [{"from": "human", "value": "x"}], "label": 1}),
    prompt("a column of images", ("'images'", "only text"), {"prompt": "x", "label": 1, "images": [{"path": "a.png"}]}),
    prompt("an image", ("'image_url'", "text"), {"prompt": [USER | {"content": [{"type": "image_url"}]}], "label": 1}),
    prompt("a part without text", ("the part",), {"prompt": [USER | {"content": [{"type": "text"}]}], "label": 1}),
    prompt("ends with an answer", ("nothing to answer",), {"prompt": [USER, ANSWER], "ground_truth": 1}),
    prompt("ground truth null", ("no 'ground_truth'", "data.label_key"), {"prompt": "x", "ground_truth": None}),
    prompt("ground truth NaN", ("no 'ground_truth'", "empty"), '{"prompt": "x", "ground_truth": NaN}'),
    prompt("no ground truth", ("no 'ground_truth'", "data.label_key"), {"prompt": "x"}),
    prompt(
        "verl's null", ("reward_model.ground_truth is empty",), {"prompt": "x", "reward_model": {"ground_truth": None}}
    ),
    prompt("an id that is a list", ("'id' must be text or a number",), PROMPT | {"id": [1]}),
    prompt("an id that is true", ("'id' must be text or a number",), PROMPT | {"id": True}),
    prompt("a source that is an object", ("'data_source' must be text",), PROMPT | {"data_source": {}}),
    prompt("a tool without a name", ("neither a name nor a tool schema",), PROMPT | {"tools": [{}]}),
    prompt("a tool that is a number", ("neither a name nor a tool schema",), PROMPT | {"tools": 5}),
    prompt("a function that is text", ("neither a name",), PROMPT | {"tools": [{"function": "calculator"}]}),
    prompt("a tool twice", ("'tools' has 'calculator' twice",), PROMPT | {"tools": ["calculator"] * 2}),
    Case(
        "an id twice",
        ("own.jsonl:2", "'x'", "own.jsonl:1"),
        PROMPTS,
        holds(2 * (json.dumps(PROMPT | {"id": "x"}) + "\n").encode()),
    ),
    Case("an id as text and number", ("the id '1'",), PROMPTS, third(PROMPT | {"id": "1"}, PROMPT | {"id": 1})),
    Case(
        "a tool that is not loaded",
        ("the tool abacus", "rollout.tools"),
        PROMPTS,
        third(PROMPT, PROMPT | {"id": "3", "tools": ["abacus"]}),
    ),
    Case(
        "prompts that are all too long",
        ("all 3 prompts are longer", "rollout.max_context"),
        PROMPTS,
        third(*[{"prompt": "1+" * 500, "ground_truth": 1}] * 2),
    ),
    Case("eval without a file", ("run.eval_every=1", "data.eval"), ("run.eval_every=1",)),
    Case("no file to evaluate on", ("data.eval=FOLDER/n.jsonl",), ("run.eval_every=1", "data.eval=FOLDER/n.jsonl")),
    Case(
        "a bad line to evaluate on",
        ("own.jsonl:3: no 'prompt'",),
        ("run.eval_every=1", "data.eval=FOLDER/own.jsonl"),
        third(PROMPT, {"x": 1}),
    ),
    Case("no training data", ("data.train is not set",), ("data.train=",)),
]

CONVERSATIONS = [
    talk("no messages", ("has no conversation", "prompt, ground_truth", "data.label_key"), PROMPT),
    talk("messages null", ("has no conversation", "columns here: none"), {"messages": None}),
    talk("a stranger", ("message 0 of 'conversations' is from 'alien'",), {"conversations": [{"from": "alien"}]}),
    talk("sharegpt in messages", ("not a message with role",), {"messages": [{"from": "human", "value": "x"}]}),
    talk("a response that is a number", ("'response' must be text",), {"prompt": "x", "response": 5}),
    talk("messages that are text", ("has no list `messages`",), {"messages": "hi"}),
    talk("messages without one", ("must be text or a list",), {"messages": []}),
    talk("only a prompt", ("end with the assistant's",), {"messages": [USER]}),
    talk("only an answer", ("begin with a prompt",), {"messages": [ANSWER]}),
    talk("ends with a question", ("end with the assistant's",), {"messages": [USER, ANSWER, USER]}),
    talk("a message that is null", ("message 1 of 'messages'",), {"messages": [USER, None, ANSWER]}),
    talk("an answer without content", ("message 1", "no content"), {"messages": [USER, {"role": "assistant"}]}),
    talk("content null", ("message 1", "no content"), {"messages": [USER, ANSWER | {"content": None}]}),
    talk("an empty answer", ("message 1", "is empty"), {"messages": [USER, ANSWER | {"content": ""}]}),
    talk("an answer of blanks", ("message 1", "is empty"), {"messages": [USER, ANSWER | {"content": "\n"}]}),
    talk("an empty question", ("message 0", "no content"), {"messages": [USER | {"content": ""}, ANSWER]}),
    talk("a foreign role", ("'gpt'", "roles are"), {"messages": [USER, {"role": "gpt", "content": "2"}, ANSWER]}),
    talk("role null", ("not a message with role",), {"messages": [USER | {"role": None}, ANSWER]}),
    talk("an image", ("'image_url'", "text"), {"messages": [USER | {"content": [{"type": "image_url"}]}, ANSWER]}),
    talk("content an object", ("must be text",), {"messages": [USER, ANSWER | {"content": {"text": "2"}}]}),
    talk("calls that are text", ("calls",), {"messages": [USER, ANSWER | {"tool_calls": "f()"}, ANSWER]}),
    talk(
        "a call without a function", ("calls",), {"messages": [USER, ANSWER | {"tool_calls": [{"name": "f"}]}, ANSWER]}
    ),
    talk(
        "a user who calls", ("only the assistant calls tools",), {"messages": [USER | {"tool_calls": [CALL]}, ANSWER]}
    ),
    talk("a tool that is a name", ("'tools' holds 'f'", "schema"), TALK | {"tools": ["f"]}),
    talk("a tool without a name", ("'tools'", "schema"), TALK | {"tools": [{"type": "function", "function": {}}]}),
    talk("a tool that is null", ("'tools'", "schema"), TALK | {"tools": [None]}),
    talk("tools that are a number", ("'tools' holds '5'",), TALK | {"tools": 5}),
    talk("parameters that are text", ("parameters",), TALK | {"tools": [{"name": "f", "parameters": "x"}]}),
    talk("not JSON", ("not JSON",), "{"),
    talk("latin-1", ("not UTF-8",), '{"messages": "é"}'),
    Case("sft: a template without an end of turn", ("model.path: the chat", "<|im_end|>"), SFT, bare_template),
    Case(
        "sft: a template that refuses all",
        ("model.path: the chat", "never", "any conversation"),
        SFT,
        refusing_template,
    ),
    of_file("a pointer of Git LFS", ("own.jsonl is a pointer of Git LFS", "git lfs pull"), holds(LFS_POINTER)),
    of_file(
        "a pointer of Git LFS for parquet",
        ("own.parquet is a pointer of Git LFS",),
        holds(LFS_POINTER, "own.parquet"),
        "own.parquet",
    ),
    Case("sft: empty", ("holds no conversation",), SFT, holds(b"\n")),
    Case("sft: prompts for conversations", ("train.jsonl:1", "`messages`"), ("algorithm=sft",)),
    Case("sft: no data", ("data.train is not set", "conversations"), ("algorithm=sft", "data.train=")),
    Case("sft: eval without a file", ("data.eval", "conversations"), ("run.eval_every=1", *SFT), third(TALK, TALK)),
    Case(
        "sft: a bad line to evaluate on",
        ("sft2.jsonl:1", "`messages`"),
        ("algorithm=sft", "data.train=FOLDER/sft.jsonl", "run.eval_every=1", "data.eval=FOLDER/sft2.jsonl"),
        holds(b"{}", "sft2.jsonl"),
    ),
    Case(
        "sft: all beyond the model",
        ("3 of 3 conversations", "2048 positions", "the shortest has"),
        SFT,
        third(*[{"messages": [USER | {"content": "1+" * 2000}, ANSWER]}] * 2),
    ),
    Case(
        "sft: parquet of other columns",
        ("own.parquet, row 0", "`messages`"),
        ("algorithm=sft", "data.train=FOLDER/own.parquet"),
        parquet([PROMPT]),
    ),
]

PREFERENCES = [
    pair("no rejected", ("no 'rejected'", "columns here"), {"prompt": "x", "chosen": "y"}),
    pair("chosen null", ("no 'chosen'",), PAIR | {"chosen": None}),
    pair("no prompt", ("no 'prompt'",), {"chosen": "2", "rejected": "3"}),
    pair("prompt without words", ("'prompt' is empty",), PAIR | {"prompt": ""}),
    pair("an answer that is a number", ("'rejected' must be text or a list",), PAIR | {"rejected": 3}),
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
    pair("a foreign role", ("'gpt'",), PAIR | {"chosen": [{"role": "gpt", "content": "x"}]}),
    pair("an image", ("'image_url'",), PAIR | {"chosen": [ANSWER | {"content": [{"type": "image_url"}]}]}),
    Case("pairs: empty", ("holds no pair",), PAIRS, holds(b"")),
    Case("pairs: the same answers", ("own.jsonl:3", "the same"), PAIRS, third(PAIR, PAIR | {"rejected": "2"})),
    Case("pairs: a tool without a name", ("own.jsonl:3", "schema"), PAIRS, third(PAIR, PAIR | {"tools": [{}]})),
    Case(
        "pairs: all too long",
        ("all 3 pairs are too long", "train.max_tokens_per_gpu"),
        PAIRS,
        third(*[PAIR | {"prompt": "1+" * 2000}] * 2),
    ),
]

TWO = "data.train=[FOLDER/train.jsonl,FOLDER/own.jsonl]"
LEVELS = [PROMPT | {"level": 1}, PROMPT | {"level": None}]

SEVERAL = [
    Case("one of two files is not there", ("data.train=FOLDER/own.jsonl", "no such file"), (TWO,)),
    Case("a bad line in the second file", ("own.jsonl:3: ", "no 'prompt'"), (TWO,), third(PROMPT, {"x": 1})),
    Case("the second file is empty", ("own.jsonl holds no prompts",), (TWO,), holds(b"")),
    Case(
        "a column that one of two files lacks",
        ("own.jsonl:1: no 'ground_truth'", "columns here: prompt, answer", "data.label_key"),
        (TWO,),
        third({"prompt": "x", "answer": 1}, {"prompt": "x", "answer": 2}),
    ),
    Case(
        "a file twice", ("named twice", "data.mixture_weights"), ("data.train=[FOLDER/train.jsonl,FOLDER/train.jsonl]",)
    ),
    Case(
        "a weight too many",
        ("data.mixture_weights has 3 numbers", "2 files", "one for each"),
        (TWO, "data.mixture_weights=[1,1,1]"),
        third(PROMPT, PROMPT),
    ),
    Case(
        "weights of one file",
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
    Case(
        "a weight that is a word", ("data.mixture_weights[1] must be a number",), (TWO, "data.mixture_weights=[1,much]")
    ),
    Case("weights that are no list", ("data.mixture_weights must be a list",), (TWO, "data.mixture_weights=3")),
    Case(
        "a weight too small to count",
        ("data.mixture_weights", "1e-05", "less than one prompt in 10000", "raise it"),
        (TWO, "data.mixture_weights=[1,0.00001]"),
        third(PROMPT, PROMPT),
    ),
    Case(
        "an order of words",
        ("own.jsonl:3: 'level' is 'hard'", "not a number"),
        (*PROMPTS, "data.curriculum_key=level"),
        third(LEVELS[0], PROMPT | {"level": "hard"}),
    ),
    Case(
        "an order of nothing",
        ("data.curriculum_key=depth", "no row of FOLDER/own.jsonl"),
        (*PROMPTS, "data.curriculum_key=depth"),
        third(*LEVELS),
    ),
    Case(
        "sft: an order of words",
        ("own.jsonl:3: 'level' is 'hard'", "not a number"),
        (*SFT, "data.curriculum_key=level"),
        third(TALK | {"level": 1}, TALK | {"level": "hard"}),
    ),
    Case(
        "pairs: an order of words",
        ("own.jsonl:3: 'level' is 'hard'", "not a number"),
        (*PAIRS, "data.curriculum_key=level"),
        third(PAIR | {"level": 1}, PAIR | {"level": "hard"}),
    ),
]

CASES = [*SEVERAL, *FILES, *LINES, *CONVERSATIONS, *PREFERENCES]
