"""Parse chat messages and tools in a row's columns to the OpenAI form. Malformed ones are a ConfigError."""

from __future__ import annotations

import json
from typing import Any

from megarl.config import ConfigError
from megarl.types import Message
from megarl.utils.text import replace_surrogates

ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_chat_messages(value: Any, location: str, key: str, role: str = "user") -> tuple[Message, ...]:
    """Parse the messages of a column: a list or its JSON; other text becomes one message of `role`.

    A message has a role and a content: text, or a list of text parts, which are joined. Only an assistant message with
    tool calls may lack content.
    """
    if isinstance(value, str):
        if not value.strip() and role == "user":
            raise ConfigError(f"{location}: {key!r} is empty text; write a prompt or drop the row")
        if (messages := _parse_json_messages(value)) is None:
            return ({"role": role, "content": value},)
        value = messages
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{location}: {key!r} must be text or a list of chat messages, not {_short(value)}")
    return tuple(_message(item, f"{location}: message {number} of {key!r}") for number, item in enumerate(value))


def _parse_json_messages(text: str) -> list[Any] | None:
    """Parse text that is the JSON of a list of messages, as in tables without nested columns; otherwise return None."""
    if not text.lstrip().startswith("["):
        return None
    try:
        messages = replace_surrogates(json.loads(text))
    except (ValueError, RecursionError):
        return None
    are_messages = (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) and "role" in message for message in messages)
    )
    return messages if are_messages else None


def _message(value: Any, location: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ConfigError(f"{location} is {_short(value)}, not a message with role and content")
    message = {name: item for name, item in value.items() if item is not None}
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise ConfigError(f"{location} has the unknown role {role[:80]!r}; roles are {', '.join(ROLES)}")
    calls = message.pop("tool_calls", None) or []
    if calls:
        if role != "assistant":
            raise ConfigError(f"{location} has tool_calls, but role {role}; only the assistant calls tools")
        _check_calls(calls, location)
        message["tool_calls"] = calls
    if isinstance(content, list):
        content = content_text(content, location)
    if content is not None and not isinstance(content, str):
        raise ConfigError(f"{location} has {_short(content)} as content, which must be text")
    if not calls and (content is None or (role == "user" and not content.strip())):
        raise ConfigError(f"{location}, of role {role}, has no content; write it or drop the row")
    message["content"] = content
    return message


def content_text(parts: list[Any], location: str) -> str:
    """Join text parts. Raises ConfigError, naming the kind, for a part of another kind."""
    return "".join(_part_text(part, location) for part in parts)


def _part_text(part: Any, location: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, str):
        return part
    if kind != "text" or not isinstance(part.get("text"), str):
        what = f"a part of type {str(kind)[:80]!r}" if kind not in (None, "text") else f"the part {_short(part)}"
        raise ConfigError(f"{location} holds {what}; only text can be trained on, {{'type': 'text', 'text': ...}}")
    return str(part["text"])


def _check_calls(calls: Any, location: str) -> None:
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ConfigError(f"{location} calls {_short(call)}, not {{'function': {{'name': ..., 'arguments': ...}}}}")
        if not isinstance(function.get("arguments", {}), str | dict):
            raise ConfigError(
                f"{location} calls {function['name'][:80]} with {_short(function['arguments'])}; arguments are an "
                "object, or its JSON as text"
            )
    if not isinstance(calls, list):
        raise ConfigError(f"{location} has tool_calls that are no list")


def parse_tool_names(value: Any, location: str) -> tuple[str, ...]:
    """Parse the column `tools` of a prompt: names or schemas (only names count); a list, a single one, or its JSON."""
    names = []
    for tool in _list_of_tools(value):
        function = tool.get("function", tool) if isinstance(tool, dict) else {"name": tool}
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{location}: 'tools' holds {_short(tool)}, neither a name nor a tool schema")
        names.append(name)
    return _check_unique(names, location)


def parse_tool_schemas(value: Any, location: str) -> list[dict[str, Any]]:
    """Parse the column `tools` of a conversation: OpenAI schemas, with or without the enclosing `function`."""
    schemas = []
    for tool in _list_of_tools(value):
        schema = tool if isinstance(tool, dict) and "function" in tool else {"type": "function", "function": tool}
        function = schema["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ConfigError(
                f"{location}: 'tools' holds {_short(tool)}, not a tool schema such as {{'type': 'function', "
                "'function': {'name': ..., 'parameters': {...}}}"
            )
        if not isinstance(function.get("parameters", {}), dict):
            raise ConfigError(f"{location}: the tool {function['name'][:80]} has parameters that are no object")
        schemas.append(schema)
    _check_unique([schema["function"]["name"] for schema in schemas], location)
    return schemas


def _list_of_tools(value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = [value]
    return [] if value is None else value if isinstance(value, list) else [value]


def _check_unique(names: list[str], location: str) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{location}: 'tools' has {name[:80]!r} twice")
    return tuple(names)


def _short(value: Any) -> str:
    return repr(str(value)[:80])
