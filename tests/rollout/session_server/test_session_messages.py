"""Normalized messages, tools and request fields of the session server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.session_server.requests import (
    CompletionRequest,
    RequestRefused,
    extend_digest,
    hash_prefixes,
    normalize_messages,
    normalize_tools,
    parse_request,
)

pytestmark = pytest.mark.alone

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "x"}'}}
USER = {"role": "user", "content": "x"}


def assistant(content: Any = "y", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def test_normalizes_messages() -> None:
    result = parse(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "half \ud83d", "name": "Ann", "odd": 1},
            assistant(None, tool_calls=[CALL], refusal=None, audio=None, annotations=[]),
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3"}]},
            assistant("", reasoning_content="hm", tool_calls=[]),
            assistant(None, refusal="I will not"),
            USER,
        ]
    ).messages
    function = {"name": "f", "arguments": {"b": 1, "a": "x"}}
    assert result == (
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "half \ufffd", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "content": "3", "tool_call_id": "c", "name": "f"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "content": "I will not"},
        USER,
    )


@pytest.mark.parametrize(
    ("messages", "message", "param"),
    [
        ("hello", "at least one message", "messages"),
        ([], "at least one message", "messages"),
        (["hello"], "must be an object", "messages[0]"),
        ([{"content": "x"}], "role must be one of system, developer, user", "messages[0].role"),
        ([{"role": "function", "content": "x"}], "not 'function'", "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "role must be", "messages[0].role"),
        ([{"role": "user"}], "content is missing", "messages[0].content"),
        ([{"role": "user", "content": 3}], "a string or a list of parts", "messages[0].content"),
        ([{"role": "user", "content": [3]}], "must be 'text'", "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "must be a string", "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"images \(image_url\)", "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "file"}]}], r"files \(file\)", "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "audio", "messages[0].content[0]"),
        ([USER, assistant(audio={"id": "x"})], "audio is not supported", "messages[1].audio"),
        ([USER, assistant()], "nothing to answer", "messages[1]"),
        ([USER, assistant(tool_calls={})], "must be a list", "messages[1].tool_calls"),
        ([USER, assistant(tool_calls=[{}])], "with type 'function'", "messages[1].tool_calls[0]"),
        ([USER, assistant(function_call={})], "deprecated", "messages[1].function_call"),
        ([{**USER, "tool_calls": [CALL]}], "only messages of the assistant", "messages[0].tool_calls"),
        ([USER, {"role": "tool", "content": "3"}], "must be a string", "messages[1].tool_call_id"),
        (
            [USER, {"role": "tool", "content": "3", "tool_call_id": "c"}],
            "is of no call",
            "messages[1].tool_call_id",
        ),
    ],
)
def test_invalid_messages_are_rejected(messages: Any, message: str, param: str) -> None:
    with pytest.raises(RequestRefused, match=message) as refused:
        normalize_messages(messages)
    assert refused.value.param == param and refused.value.status == 400


def nested(levels: int) -> Any:
    nested: Any = {}
    for _ in range(levels):
        nested = {"x": nested}
    return nested


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "must be a list"),
        ([{}], r"tools\[0\] must be an object"),
        ([{"type": "function", "function": {}}], "name must be a string"),
        ([{"type": "function", "function": {"name": ""}}], "name is empty"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "parameters must be an object"),
        ([{"type": "function", "function": {"name": "f"}}] * 2, "the same name"),
        ([{"type": "function", "function": {"name": "f", "parameters": nested(200)}}], "levels deep"),
    ],
)
def test_invalid_tools_are_rejected(tools: Any, message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        normalize_tools(tools)


def test_equal_conversations_have_equal_prefix_hashes() -> None:
    def history(*messages: Any, schemas: Any = ()) -> bytes:
        return hash_prefixes(normalize_messages([*messages, USER]), schemas)[-2]

    equal_requests = [
        history(USER, assistant("y")),
        history({**USER, "odd": 1}, assistant(" y\n")),
        history({**USER, "content": [{"type": "text", "text": "x"}]}, assistant("y", reasoning_content="hm")),
        history(USER, assistant([{"type": "text", "text": "y"}], tool_calls=[])),
    ]
    assert len(set(equal_requests)) == 1
    calls = [
        history(USER, assistant(None, tool_calls=[CALL])),
        history(USER, assistant("", tool_calls=[{**CALL, "id": "other"}])),
        history(USER, assistant("", tool_calls=[{**CALL, "function": {"name": "f", "arguments": '{"a":"x","b":1}'}}])),
    ]
    assert len(set(calls)) == 1
    other_requests = [
        history(USER, assistant("z")),
        history(USER, USER, assistant("y")),
        history({**USER, "content": " x"}, assistant("y")),
        history({**USER, "name": "Ann"}, assistant("y")),
        history({**USER, "role": "system"}, assistant("y")),
        history(USER, assistant("y"), schemas=[{"name": "f"}]),
        history(USER, assistant("", tool_calls=[{**CALL, "function": {"name": "g", "arguments": "{}"}}])),
        history(USER, assistant("", tool_calls=[{**CALL, "function": {"name": "f", "arguments": "{"}}])),
    ]
    assert len({*equal_requests, *calls, *other_requests}) == 10
    assert extend_digest(history(USER), normalize_messages([USER, assistant("y"), USER])[1]) == equal_requests[0]


def parse(**fields: Any) -> CompletionRequest:
    return parse_request(
        json.dumps({"model": "policy", "messages": [USER], **fields}).encode(), "policy", {"temperature": 0.7}
    )


def test_parses_request_fields() -> None:
    assert parse() == CompletionRequest((USER,))
    result = parse(n=3, max_tokens=7, max_completion_tokens=9, stop="x", stream=True, logprobs=True, top_logprobs=0)
    assert result == CompletionRequest((USER,), (), 3, 7, ("x",), True, False, True)
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage and parse(
        stop=["a", "b"]
    ).stop_strings == ("a", "b")
    assert parse(temperature=0.7, top_p=1, tools=None, stop=None, n=None, metadata={}, store=False).ignored == ()
    assert parse(
        temperature=1.0, response_format={"type": "json_object"}, logit_bias={"1": 2}, top_logprobs=3
    ).ignored == (
        "logit_bias",
        "response_format",
        "temperature",
        "top_logprobs",
    )
    named_tool = {"type": "function", "function": {"name": "f"}}
    assert parse(tool_choice=named_tool).ignored == parse(tool_choice="required").ignored == ("tool_choice",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "7"}, "max_completion_tokens"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": 3}, "stream_options"),
        ({"logprobs": 3}, "logprobs"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"model": "other"}, "model"),
        ({"model": ["policy"]}, "model"),
    ],
)
def test_invalid_fields_are_rejected(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse(**fields)
    assert refused.value.param == param and param in str(refused.value) and refused.value.status == 400


LEAF = st.sampled_from(
    [None, True, 0, 3, -1, 1.5, float("nan"), 10**30, "", "user", "assistant", "tool", "text", "image_url", "function"]
    + ["c", "{}", "f", "policy", "\ud83d", [], {}, [[]], {"type": "text", "text": "x"}, {"type": []}]
)
NAMES = ["role", "content", "tool_calls", "tool_call_id", "name", "type", "function", "arguments", "id"]
OBJECT = st.dictionaries(
    st.sampled_from(NAMES), LEAF | st.dictionaries(st.sampled_from(NAMES), LEAF, max_size=3), max_size=4
)
VALUE = LEAF | OBJECT | st.lists(LEAF | OBJECT, max_size=3)
FIELDS = ["messages", "tools", "n", "max_tokens", "stop", "stream", "logprobs", "tool_choice", "temperature", "odd"]


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUE))
def test_any_request_is_parsed_or_rejected(fields: dict[str, Any]) -> None:
    try:
        result = parse(**{"messages": [USER], **fields})
    except RequestRefused as refused:
        assert refused.status == 400 and str(refused)
    else:
        hash_prefixes(result.messages, result.schemas)
