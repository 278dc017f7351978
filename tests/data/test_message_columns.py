"""Messages and tools of a row: accepted forms, and errors for the others."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.data.columns import parse_chat_messages, parse_tool_names, parse_tool_schemas

pytestmark = pytest.mark.alone

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}


def test_joins_text_parts_and_allows_calls_without_content() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image_url": None}]
    messages = parse_chat_messages(
        [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [CALL]}], "f", "p"
    )
    assert messages == (
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    )
    assert parse_chat_messages("hi", "f", "p") == (USER,)
    assert parse_chat_messages("", "f", "p", role="assistant") == ({"role": "assistant", "content": ""},)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (" \n", "f: 'p' is empty text"),
        (None, "f: 'p' must be text or a list of chat messages, not 'None'"),
        ([], "must be text or a list"),
        ({"role": "user"}, "must be text or a list"),
        ([USER, "x"], "f: message 1 of 'p' is 'x', not a message with role and content"),
        ([{"content": "x"}], "not a message with role"),
        ([{"role": 5, "content": "x"}], "not a message with role"),
        ([{"from": "human", "value": "x"}], "not a message with role"),
        ([{"role": "human", "content": "x"}], "the unknown role 'human'; roles are system, developer, user"),
        ([{"role": "user", "content": None}], "message 0 of 'p', of role user, has no content"),
        ([{"role": "assistant", "content": None}], "of role assistant, has no content"),
        ([{"role": "assistant", "tool_calls": []}], "of role assistant, has no content"),
        ([{"role": "tool"}], "of role tool, has no content"),
        ([{"role": "user", "content": []}], "has no content"),
        ([{"role": "user", "content": "\t"}], "has no content"),
        ([{"role": "user", "content": 5}], "has '5' as content, which must be text"),
        ([{"role": "user", "content": {"text": "x"}}], "which must be text"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "a part of type 'image_url'; only text",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "the part .*; only text"),
        ([{"role": "user", "content": [5]}], "the part '5'; only text"),
        ([USER | {"tool_calls": [CALL]}], "has tool_calls, but role user"),
        ([{"role": "assistant", "tool_calls": "f(1)"}], r"calls 'f\(1\)', not {'function'"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "calls .*, not {'function'"),
        ([{"role": "assistant", "tool_calls": CALL}], "tool_calls that are not a list"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
            "calls f with '5'; argum",
        ),
    ],
)
def test_invalid_messages_raise(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_chat_messages(value, "f", "p")


def test_tool_forms() -> None:
    bare_schema, wrapped_schema = {"name": "f", "parameters": {}}, {"type": "function", "function": {"name": "g"}}
    assert parse_tool_names(["x", bare_schema, wrapped_schema], "f") == ("x", "f", "g")
    assert (
        parse_tool_names('[{"name": "f"}]', "f") == ("f",)
        and parse_tool_names("x", "f") == ("x",)
        and parse_tool_names(None, "f") == ()
    )
    assert parse_tool_schemas([bare_schema, wrapped_schema], "f") == [
        {"type": "function", "function": bare_schema},
        wrapped_schema,
    ]
    assert parse_tool_schemas('[{"name": "f"}]', "f") == [{"type": "function", "function": {"name": "f"}}]
    assert parse_tool_schemas(None, "f") == parse_tool_schemas([], "f") == []


@pytest.mark.parametrize(
    ("tool", "name_problem", "schema_problem"),
    [
        (5, "neither a name nor a tool schema", "not a tool schema such as"),
        ({"parameters": {}}, "neither a name", "not a tool schema"),
        ({"function": "f"}, "neither a name", "not a tool schema"),
        ({"function": {"name": ""}}, "neither a name", "not a tool schema"),
        ("f", "", "'tools' holds 'f', not a tool schema"),
        ({"name": "f", "parameters": "{}"}, "", "the tool f has parameters that are not an object"),
    ],
)
def test_invalid_tools_raise(tool: Any, name_problem: str, schema_problem: str) -> None:
    if name_problem:
        with pytest.raises(ConfigError, match=name_problem):
            parse_tool_names([tool], "f")
    with pytest.raises(ConfigError, match=schema_problem):
        parse_tool_schemas([tool], "f")


def test_duplicate_tools_raise() -> None:
    with pytest.raises(ConfigError, match="'tools' has 'f' twice"):
        parse_tool_names(["f", "g", "f"], "here")
    with pytest.raises(ConfigError, match="'tools' has 'f' twice"):
        parse_tool_schemas([{"name": "f"}, {"function": {"name": "f"}}], "here")
