"""Preference pairs in every accepted form, and errors that name their line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megarl.config import ConfigError
from megarl.data.datasets import Pair, TableDataset, read_preferences
from megarl.types import Rollout

pytestmark = pytest.mark.alone


class CharTokenizer:
    """A tokenizer whose ids are code points. Its template writes `(role:content;`, with thoughts in the last turn only,
    as Qwen3's does."""

    eos_token = ";"

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: Any, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        text = "".join(f"[{tool['function']['name']}]" for tool in tools or ())
        for message in messages:
            thought = "?" if message["role"] == "assistant" and message is messages[-1] else ""
            text += f"({message['role'][0]}:{thought}{message['content']}{self.eos_token}\n"
        return text + ("(a:" if add_generation_prompt else "")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(char) for char in text]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


IMPLICIT = {"chosen": [user("1+1"), assistant("2")], "rejected": [user("1+1"), assistant("three")]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path, max_tokens: int = 1000, max_length: int = 1000) -> tuple[TableDataset[Pair], int]:
    return read_preferences(path, CharTokenizer(), max_tokens, max_length)


def text(rollout: Rollout) -> str:
    return "".join(map(chr, rollout.token_ids))


@pytest.mark.parametrize(
    "row",
    [
        IMPLICIT,
        {"prompt": "1+1", "chosen": "2", "rejected": "three"},
        {"prompt": [user("1+1")], "chosen": [assistant("2")], "rejected": [assistant("three")]},
        {"prompt": [user("1+1")], "chosen": "2", "rejected": "three"},
        {
            "prompt": "1+1",
            "score_chosen": 4.5,
            **IMPLICIT,
        },  # as in UltraFeedback, with the prompt also in the chats
        {"chosen": "\n\nHuman: 1+1\n\nAssistant: 2", "rejected": "\n\nHuman: 1+1\n\nAssistant: three"},
        {
            "conversations": [{"from": "human", "value": "1+1"}],
            "chosen": {"from": "gpt", "value": "2"},
            "rejected": {"from": "gpt", "value": "three"},
        },
    ],
    ids=["implicit", "strings", "explicit", "mixed", "twice", "hh", "sharegpt"],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_all_forms_give_the_same_pair(row: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write(path, "", row)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    pairs, num_dropped = read(path)
    assert (len(pairs), num_dropped) == (1, 0)
    (pair,) = pairs
    assert text(pair.chosen) == "(u:1+1;\n(a:?2;" and text(pair.rejected) == "(u:1+1;\n(a:?three;"
    # Like a rollout, it ends with the end-of-turn token, not with what the template appends.
    assert [turn.is_action for turn in pair.chosen.turns] == [False, True]
    assert pair.num_tokens == 14 + 18


def test_only_the_last_response_is_an_action(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c")]
    tools = [{"type": "function", "function": {"name": "calc"}}]
    row = {"prompt": chat, "chosen": "d", "rejected": [assistant("e"), user("f"), assistant("g")], "tools": tools}
    (pair,), _ = read(write(tmp_path / "a.jsonl", row))
    assert text(pair.chosen) == "[calc](s:s;\n(u:a;\n(a:b;\n(u:c;\n(a:?d;"
    assert text(pair.rejected) == "[calc](s:s;\n(u:a;\n(a:b;\n(u:c;\n(a:e;\n(u:f;\n(a:?g;"


@pytest.mark.parametrize(
    "row, message",
    [
        ("{", r"a.jsonl:2: not JSON"),
        ("[1]", r"a.jsonl:2: a list, not an object"),
        ({"prompt": "x", "chosen": "y"}, r"a.jsonl:2: no 'rejected'; .*columns here: prompt, chosen"),
        ({"prompt": "x", "chosen": None, "rejected": "y"}, r"a.jsonl:2: no 'chosen'; .*columns here: prompt, rejected"),
        ({"prompt": "x", "chosen": "y", "rejected": "y"}, r"a.jsonl:2: 'chosen' and 'rejected' are the same"),
        ({"chosen": "x", "rejected": "y"}, r"a.jsonl:2: 'chosen' begins with the answer, and there is no 'prompt'"),
        ({"prompt": "x", "chosen": [], "rejected": "y"}, r"a.jsonl:2: 'chosen' must be text or a list of chat mess"),
        (
            {"prompt": "x", "chosen": "y", "rejected": [{"content": "z"}]},
            r"a.jsonl:2: message 0 of 'rejected' is .*not a message",
        ),
        (IMPLICIT | {"rejected": [user("1+1")]}, r"a.jsonl:2: 'rejected' must end with the assistant's.* role user"),
        (IMPLICIT | {"rejected": [user("1+2"), assistant("3")]}, r"a.jsonl:2: 'chosen' and 'rejected' begin diff"),
        (
            IMPLICIT | {"prompt": "1+2"},
            r"a.jsonl:2: 'chosen' begins neither with the answer nor with the row's 'prompt'",
        ),
    ],
)
def test_invalid_pairs_raise_with_their_line(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read(write(tmp_path / "a.jsonl", IMPLICIT, row))
    assert "\n" not in str(error.value)


def test_files_without_pairs_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no pair"):
        read(write(tmp_path / "a.jsonl", ""))
    with pytest.raises(ConfigError, match="no data file"):
        read(tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match="'.csv' is not known"):
        read(write(tmp_path / "c.csv", ""))


def test_long_pairs_are_dropped_and_counted(tmp_path: Path) -> None:
    long = {"prompt": "1+1", "chosen": "2" * 30, "rejected": "3"}  # 43 and 14 tokens; the others have 14 and 18
    path = write(tmp_path / "a.jsonl", IMPLICIT, long, IMPLICIT)
    assert [len(read(path, *limits)[0]) for limits in ((57, 43), (56, 43), (57, 42), (32, 18))] == [3, 2, 2, 2]
    pairs, num_dropped = read(path, 56)
    assert num_dropped == 1 and [text(pair.chosen) for pair in pairs] == ["(u:1+1;\n(a:?2;"] * 2
    with pytest.raises(
        ConfigError, match=r"all 3 pairs are too long: the shortest has 32 tokens .*micro-batch holds 31"
    ):
        read(path, 31)


def test_slicing_and_repeated_access(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "chosen": "a", "rejected": "b"} for i in range(4)]
    pairs, _ = read(write(tmp_path / "a.jsonl", *rows))
    assert [text(pair.chosen) for pair in pairs[1:3]] == ["(u:1;\n(a:?a;", "(u:2;\n(a:?a;"]
    assert pairs[3] == pairs[3] and pairs[3] != pairs[2]


def test_template_errors_name_the_line(tmp_path: Path) -> None:
    class Strict(CharTokenizer):
        def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
            if messages[0]["content"] != "a":
                raise ValueError("roles must alternate")
            return super().apply_chat_template(messages, **options)

    with pytest.raises(ConfigError, match=r"a.jsonl:1, 'chosen': the chat template cannot render.*must alternate"):
        read_preferences(write(tmp_path / "a.jsonl", IMPLICIT), Strict(), 100, 100)
