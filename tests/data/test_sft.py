"""SFT conversations to turns, with a character tokenizer and a small chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.data.datasets import read_conversations

pytestmark = pytest.mark.alone


class CharTokenizer:
    """A tokenizer whose ids are code points; its template writes `(role:content;`, where `;` ends a turn."""

    eos_token = ";"
    drops_earlier_responses = False

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: Any, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        text = "".join(f"[{tool['function']['name']}]" for tool in tools or ())
        for message in messages:
            content = message["content"]
            if self.drops_earlier_responses and message["role"] == "assistant" and message is not messages[-1]:
                content = ""
            text += f"({message['role'][0]}:{content}{self.eos_token}\n"
        return text + ("(a:" if add_generation_prompt else "")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(char) for char in text]


CONVERSATION = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "call"},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_conversation_turns_by_hand(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "calc"}}]
    row = {"id": "x", "messages": CONVERSATION, "tools": tools, "ground_truth": 2}
    (rollout,) = read_conversations(write(tmp_path / "a.jsonl", row), CharTokenizer())
    texts = ["".join(map(chr, turn.token_ids)) for turn in rollout.turns]
    assert texts == ["[calc](u:1+1;\n(a:", "call;", "\n(t:2;\n(a:", "two;"]
    assert [turn.is_action for turn in rollout.turns] == [False, True, False, True]
    assert rollout.turns[1].logprobs.tolist() == [0.0] * 5 and rollout.turns[1].weight_version == -1
    assert rollout.prompt.tools == ("calc",) and rollout.prompt.messages == tuple(CONVERSATION[:1])
    assert rollout.prompt.token_ids is rollout.turns[0].token_ids and rollout.prompt.ground_truth == 2
    assert rollout.messages == tuple(CONVERSATION) and rollout.answer == "two"


def test_conversations_are_read_on_access(tmp_path: Path) -> None:
    rows = [{"messages": CONVERSATION[:1] + [{"role": "assistant", "content": str(i)}]} for i in range(5)]
    rollouts = read_conversations(write(tmp_path / "a.jsonl", *rows), CharTokenizer())
    assert len(rollouts) == 5 and [rollout.answer for rollout in rollouts[1:3]] == ["1", "2"]
    assert rollouts[3] == rollouts[3] and rollouts[3].group == 3
    with pytest.raises(IndexError):
        rollouts[5]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "a.jsonl:2: not JSON"),
        ([], "a.jsonl:2: a list, not an object"),
        ({"prompt": "x"}, "a.jsonl:2 has no conversation: neither a list `messages` nor"),
        ({"messages": ["x"]}, "a.jsonl:2: message 0 of 'messages' is 'x', not a message"),
        ({"messages": CONVERSATION[:1]}, "a.jsonl:2: messages must begin with a prompt and end with the assistant's"),
        ({"messages": CONVERSATION[1:]}, "a.jsonl:2: messages must begin with a prompt and end with the assistant's"),
        (
            {"messages": [*CONVERSATION[:3], {"role": "assistant", "content": " "}]},
            "message 3 of 'messages', the assistant's,",
        ),
        ({"messages": CONVERSATION, "tools": ["calc"]}, "a.jsonl:2: 'tools' holds 'calc', not a tool schema"),
    ],
)
def test_invalid_conversations_raise(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        read_conversations(write(tmp_path / "a.jsonl", {"messages": CONVERSATION}, row), CharTokenizer())


def test_missing_or_empty_file_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no data file .*gone"):
        read_conversations(tmp_path / "gone.jsonl", CharTokenizer())
    with pytest.raises(ConfigError, match="holds no conversation"):
        read_conversations(write(tmp_path / "a.jsonl", ""), CharTokenizer())


def test_template_that_rewrites_history_raises(tmp_path: Path) -> None:
    tokenizer = CharTokenizer()
    tokenizer.drops_earlier_responses = True
    rollouts = read_conversations(write(tmp_path / "a.jsonl", {"messages": CONVERSATION}), tokenizer)
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        rollouts[0]
