"""Conversation columns in common formats beyond the README's examples, and invalid ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.data.columns import check_media, parse_answer, parse_conversation, row_id, row_source

pytestmark = pytest.mark.alone

QUESTION, ANSWER = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}
SHAREGPT = [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]
CALL = {"name": "add", "arguments": {"a": 2}}


def parse(row: dict[str, Any], **keys: str) -> tuple[Any, ...]:
    return parse_conversation(row, "f:1", **keys)


def test_first_recognised_form_wins() -> None:
    ambiguous = {"messages": [QUESTION, ANSWER], "conversations": [{"from": "human", "value": "x"}], "prompt": "y"}
    assert parse(ambiguous) == (QUESTION, ANSWER) == parse({"conversations": SHAREGPT, "prompt": "y", "response": "z"})
    assert parse({"messages": None, "conversations": None, "prompt": "2+3?", "response": "5"}) == (QUESTION, ANSWER)


def test_lists_may_be_json_text() -> None:
    assert parse({"messages": json.dumps([QUESTION, ANSWER])}) == (QUESTION, ANSWER)
    assert parse({"conversations": json.dumps(SHAREGPT)}) == (QUESTION, ANSWER)


def test_json_text_is_checked_like_a_row() -> None:
    lone_surrogate = json.dumps([QUESTION, {"role": "assistant", "content": "\ud83d"}])
    assert parse({"messages": lone_surrogate})[1]["content"] == "\ufffd"
    with pytest.raises(ConfigError, match="no list `messages`"):
        parse({"messages": "[" * 5000 + "]" * 5000})
    with pytest.raises(ConfigError, match="calls"):
        parse({"conversations": [{"from": "function_call", "value": '{"a": ' + "[" * 500 + "]" * 500 + "}"}]})


def test_sharegpt_system_prompts() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert parse({"conversations": SHAREGPT, "system": "Be brief."}) == (system, QUESTION, ANSWER)
    assert parse({"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]}) == (system, QUESTION, ANSWER)
    assert parse({"conversations": SHAREGPT, "system": ""}) == (QUESTION, ANSWER)


def test_conversations_column_may_have_roles() -> None:
    assert parse({"conversations": [QUESTION, ANSWER]}) == (QUESTION, ANSWER)


@pytest.mark.parametrize(
    "value", [json.dumps(CALL), json.dumps([CALL]), json.dumps({"type": "function", "function": CALL})]
)
def test_sharegpt_tool_calls(value: str) -> None:
    (_, called, observed) = parse(
        {
            "conversations": [
                SHAREGPT[0],
                {"from": "function_call", "value": value},
                {"from": "observation", "value": "5"},
            ]
        }
    )
    assert called == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
    assert observed == {"role": "tool", "content": "5"}


def test_custom_column_names() -> None:
    row = {"instruction": "2+3?", "output": "5", "response": "no"}
    assert parse(row, prompt_key="instruction", answer_key="output") == (QUESTION, ANSWER)


def test_prompt_may_be_several_messages() -> None:
    before = [{"role": "system", "content": "Be brief."}, QUESTION]
    assert parse({"prompt": before, "completion": "5"}) == (*before, ANSWER)


INVALID_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no conversation": (
        {"text": "x"},
        "f:1 has no conversation: .*'prompt' with 'response' or 'completion'; columns here: text",
    ),
    "no response": ({"prompt": "x"}, "no conversation: .*columns here: prompt; .*data.prompt_key and data.label_key"),
    "messages are text": (
        {"messages": "hi"},
        "f:1 has no list `messages`, but 'hi'; write its messages as a list",
    ),
    "messages are an object": ({"messages": {"role": "user"}}, "no list `messages`"),
    "empty conversations": ({"conversations": []}, "'conversations' must be text or a list of chat messages"),
    "unknown speaker": (
        {"conversations": [{"from": "alien", "value": "x"}]},
        "message 0 of 'conversations' is from 'alien'",
    ),
    "speaker is a list": ({"conversations": [{"from": ["x"], "value": "x"}]}, "is from .*; must be one of"),
    "value is null": ({"conversations": [{"from": "human", "value": None}]}, "has 'None' as value, which must be text"),
    "call is text": (
        {"conversations": [SHAREGPT[0], {"from": "function_call", "value": "add(2)"}]},
        r"message 1 of 'conversations' calls 'add\(2\)', not {\"name\"",
    ),
    "call without name": (
        {"conversations": [SHAREGPT[0], {"from": "function_call", "value": "{}"}]},
        "calls .*not {'func",
    ),
    "call is a number": ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": "[5]"}]}, "calls"),
    "no calls": ({"conversations": [{"from": "function_call", "value": "[]"}]}, "message 0 .* calls '\\[\\]'"),
    "response is a number": (
        {"prompt": "x", "response": 5},
        "'response' must be text or a list of chat messages",
    ),
}


@pytest.mark.parametrize("name", INVALID_ROWS)
def test_invalid_conversations_raise(name: str) -> None:
    row, message = INVALID_ROWS[name]
    with pytest.raises(ConfigError, match=message):
        parse(row)


def test_nonempty_multimodal_columns_raise() -> None:
    check_media({"images": [{"bytes": b"x"}], "videos": None, "audios": []}, "f:1")
    for name in ("videos", "audios"):
        with pytest.raises(ConfigError, match=f"f:1: there are '{name}'; only text and images can be trained on"):
            check_media({name: [{"bytes": b"x"}]}, "f:1")


def test_parses_hh_dialogues() -> None:
    text = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: 2+3?\nQuick!\n\nAssistant: 5"
    assert [message["content"] for message in parse_answer(text, "f", "chosen")] == [
        "Hi",
        "Yes?",
        "2+3?\nQuick!",
        "5",
    ]
    assert parse_answer("Human: no dialogue", "f", "chosen")[0]["role"] == "assistant"
    with pytest.raises(ConfigError, match="message 0 of 'chosen', of role user, has no content"):
        parse_answer("\n\nHuman: \n\nAssistant: x", "f", "chosen")


def test_row_ids_and_sources() -> None:
    assert row_id({"id": 5}, "f", "", "a-0") == "5" and row_id({}, "f", "", "a-0") == "a-0"
    assert row_id({"id": 5}, "f", "math", "0") == "math-5" and row_id({"id": None}, "f", "math", "f:1") == "f:1"
    assert row_source({"data_source": "x"}, "f", "math") == "x" and row_source({}, "f", "math") == "math"
    assert row_source({}, "f", "") == ""
    with pytest.raises(ConfigError, match="f: 'id' must be text or a number"):
        row_id({"id": True}, "f", "", "")
    with pytest.raises(ConfigError, match="f: 'data_source' must be text or a number"):
        row_source({"data_source": []}, "f", "")
