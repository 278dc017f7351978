"""Columns that people have: what is beyond the README's rows, and what cannot be meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.data.columns import check_text_only, parse_answer, parse_conversation, row_id, row_source

pytestmark = pytest.mark.alone

QUESTION, ANSWER = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}
SAID = [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]
CALL = {"name": "add", "arguments": {"a": 2}}


def talk(row: dict[str, Any], **keys: str) -> tuple[Any, ...]:
    return parse_conversation(row, "f:1", **keys)


def test_the_first_of_several_forms_counts() -> None:
    both = {"messages": [QUESTION, ANSWER], "conversations": [{"from": "human", "value": "x"}], "prompt": "y"}
    assert talk(both) == (QUESTION, ANSWER) == talk({"conversations": SAID, "prompt": "y", "response": "z"})
    assert talk({"messages": None, "conversations": None, "prompt": "2+3?", "response": "5"}) == (QUESTION, ANSWER)


def test_lists_may_be_their_json() -> None:
    assert talk({"messages": json.dumps([QUESTION, ANSWER])}) == (QUESTION, ANSWER)
    assert talk({"conversations": json.dumps(SAID)}) == (QUESTION, ANSWER)


def test_json_in_text_is_as_strict_as_a_row() -> None:
    half = json.dumps([QUESTION, {"role": "assistant", "content": "\ud83d"}])
    assert talk({"messages": half})[1]["content"] == "\ufffd"
    with pytest.raises(ConfigError, match="no list `messages`"):
        talk({"messages": "[" * 5000 + "]" * 5000})
    with pytest.raises(ConfigError, match="calls"):
        talk({"conversations": [{"from": "function_call", "value": '{"a": ' + "[" * 500 + "]" * 500 + "}"}]})


def test_system_prompts_of_sharegpt() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert talk({"conversations": SAID, "system": "Be brief."}) == (system, QUESTION, ANSWER)
    assert talk({"conversations": [{"from": "system", "value": "Be brief."}, *SAID]}) == (system, QUESTION, ANSWER)
    assert talk({"conversations": SAID, "system": ""}) == (QUESTION, ANSWER)


def test_roles_under_the_name_conversations() -> None:
    assert talk({"conversations": [QUESTION, ANSWER]}) == (QUESTION, ANSWER)


@pytest.mark.parametrize(
    "value", [json.dumps(CALL), json.dumps([CALL]), json.dumps({"type": "function", "function": CALL})]
)
def test_calls_of_sharegpt(value: str) -> None:
    (_, called, observed) = talk(
        {"conversations": [SAID[0], {"from": "function_call", "value": value}, {"from": "observation", "value": "5"}]}
    )
    assert called == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
    assert observed == {"role": "tool", "content": "5"}


def test_columns_of_other_names() -> None:
    row = {"instruction": "2+3?", "output": "5", "response": "no"}
    assert talk(row, prompt_key="instruction", answer_key="output") == (QUESTION, ANSWER)


def test_a_prompt_of_several_messages_goes_before_the_answer() -> None:
    before = [{"role": "system", "content": "Be brief."}, QUESTION]
    assert talk({"prompt": before, "completion": "5"}) == (*before, ANSWER)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": (
        {"text": "x"},
        "f:1 has no conversation: .*'prompt' with 'response' or 'completion'; columns here: text",
    ),
    "no answer": ({"prompt": "x"}, "no conversation: .*columns here: prompt; .*data.prompt_key and data.label_key"),
    "messages that are text": (
        {"messages": "hi"},
        "f:1 has no list `messages`, but 'hi'; write its messages as a list",
    ),
    "messages that are an object": ({"messages": {"role": "user"}}, "no list `messages`"),
    "conversations of none": ({"conversations": []}, "'conversations' must be text or a list of chat messages"),
    "a stranger": (
        {"conversations": [{"from": "alien", "value": "x"}]},
        "message 0 of 'conversations' is from 'alien'",
    ),
    "a list for a speaker": ({"conversations": [{"from": ["x"], "value": "x"}]}, "is from .*; must be one of"),
    "value null": ({"conversations": [{"from": "human", "value": None}]}, "has 'None' as value, which must be text"),
    "a call that is words": (
        {"conversations": [SAID[0], {"from": "function_call", "value": "add(2)"}]},
        r"message 1 of 'conversations' calls 'add\(2\)', not {\"name\"",
    ),
    "a call of no name": ({"conversations": [SAID[0], {"from": "function_call", "value": "{}"}]}, "calls .*not {'func"),
    "a call that is a number": ({"conversations": [SAID[0], {"from": "function_call", "value": "[5]"}]}, "calls"),
    "no calls": ({"conversations": [{"from": "function_call", "value": "[]"}]}, "message 0 .* calls '\\[\\]'"),
    "an answer that is a number": (
        {"prompt": "x", "response": 5},
        "'response' must be text or a list of chat messages",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_meant(name: str) -> None:
    row, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        talk(row)


def test_columns_of_what_is_no_text_are_refused_by_name_unless_they_are_empty() -> None:
    check_text_only({"images": [], "videos": None, "image": "a container's"}, "f:1")
    for name in ("images", "videos", "audios"):
        with pytest.raises(ConfigError, match=f"f:1: there are '{name}'; only text can be trained on: drop the row"):
            check_text_only({name: [{"bytes": b"x"}]}, "f:1")


def test_dialogues_of_hh() -> None:
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


def test_ids_and_sources_of_one_file_and_of_several() -> None:
    assert row_id({"id": 5}, "f", "", "a-0") == "5" and row_id({}, "f", "", "a-0") == "a-0"
    assert row_id({"id": 5}, "f", "math", "0") == "math-5" and row_id({"id": None}, "f", "math", "f:1") == "f:1"
    assert row_source({"data_source": "x"}, "f", "math") == "x" and row_source({}, "f", "math") == "math"
    assert row_source({}, "f", "") == ""
    with pytest.raises(ConfigError, match="f: 'id' must be text or a number"):
        row_id({"id": True}, "f", "", "")
    with pytest.raises(ConfigError, match="f: 'data_source' must be text or a number"):
        row_source({"data_source": []}, "f", "")
