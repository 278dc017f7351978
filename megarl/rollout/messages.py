"""Messages as tools, users and clients write them, made into what a chat template takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from megarl.config import ConfigError
from megarl.data.chats import ROLES, content_text
from megarl.data.text import encodable
from megarl.rollout.controls import Controls
from megarl.types import Message

_NOT_TEXT = ("audio", "image", "images", "video", "videos", "file", "files")
_OWN_ID = re.compile(r"functions\.(.+):\d+")
_WITHHELD = "(withheld: the output contains control tokens)"
_RESULT: Message = {"role": "tool", "name": "f", "tool_call_id": "functions.f:0"}

Form = Callable[[Message], Message]
"""A message with calls, as one kind of template takes it."""


def call_id(name: str, number: int) -> str:
    """Of a tool's call, the number counts all of a conversation: as Kimi K2 writes it, and others take any."""
    return f"functions.{name}:{number}"


def plain(message: Message, number: int = 0) -> Message:
    """The message with its content as text and what else templates read of its role. Raises ConfigError for what is no
    message, or holds what is not text. number: in its list, for the error."""
    where = f"message {number}"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise ConfigError(f"{where} has the unknown role {str(role)[:80]!r}; roles are {', '.join(ROLES)}")
    role, content = message["role"], message.get("content")
    for name in _NOT_TEXT:
        if message.get(name):
            raise ConfigError(f"{where}, of role {role}, has {name!r}; only text can be trained on: say it in words")
    text = content_text(content, where) if isinstance(content, list) else "" if content is None else str(content)
    found: Message = {"role": role, "content": encodable(text)}
    if message.get("name"):
        found["name"] = encodable(str(message["name"]))
    if role == "tool":
        own = str(message.get("tool_call_id") or "")
        named = _OWN_ID.fullmatch(own)
        name = found.get("name") or (encodable(named[1]) if named else "tool")
        found |= {"name": name, "tool_call_id": encodable(own or call_id(name, 0))}
    elif role == "assistant":
        thought = message.get("reasoning_content") or message.get("reasoning")
        if thought:
            found["reasoning_content"] = encodable(str(thought))
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list | tuple):
                raise ConfigError(f"{where} has tool_calls that are no list")
            found["tool_calls"] = [_call(call, where) for call in calls]
    return found


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where} calls {str(call)[:80]!r}, not {{'function': {{'name': ..., 'arguments': ...}}}}")
    name, arguments = encodable(function["name"]), encodable(function.get("arguments") or {})
    if isinstance(arguments, str):
        try:
            loaded = encodable(json.loads(arguments))
        except (ValueError, RecursionError):
            loaded = arguments
        arguments = loaded if isinstance(loaded, dict) else arguments
    own = encodable(str(call.get("id") or call_id(name, 0)))
    return {"id": own, "type": "function", "function": {"name": name, "arguments": arguments}}


def safe(message: Message, controls: Controls) -> Message:
    """A plain message in which others than the template have written no control tokens. Tags stay, see `Controls`, but
    for what a tool says, and in names, ids and arguments: there they would be taken for the policy's."""

    strict = message["role"] == "tool"
    return {
        key: value
        if key == "role"
        else controls.escape(value, tags=strict)
        if key in ("content", "reasoning_content")
        else _escaped(value, controls)
        for key, value in message.items()
    }


def safe_schemas(schemas: Sequence[dict[str, Any]], controls: Controls) -> list[dict[str, Any]]:
    """Schemas in which there are no control tokens: a client or a server of tools may have described them. Tags stay,
    as in `safe`."""
    text = repr(schemas)
    if len(controls.spelled(text)) == len(controls.tags_in(text)):  # as nearly always
        return list(schemas)
    return [_escaped(schema, controls, tags=False) for schema in schemas]


def _escaped(value: Any, controls: Controls, tags: bool = True) -> Any:
    """A value as of JSON, with all of its texts escaped."""
    if isinstance(value, str):
        return controls.escape(value, tags)
    if isinstance(value, dict):
        return {_escaped(key, controls, tags): _escaped(item, controls, tags) for key, item in value.items()}
    return [_escaped(item, controls, tags) for item in value] if isinstance(value, list | tuple) else value


def hollow(message: Message) -> Message:
    """In place of a tool's result one that says nothing: what the template itself writes is of the same tokens."""
    return {**_RESULT, "content": "0"} if message["role"] == "tool" else message


def withheld(message: Message) -> Message:
    """In place of a message in which a tokenizer reads control tokens that it does not spell."""
    return {**(_RESULT if message["role"] == "tool" else message), "content": _WITHHELD}


def _text(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _formed(content: str | None, as_text: bool) -> Form:
    def form(message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
            if as_text and not isinstance(call["function"]["arguments"], str)
            else call
            for call in message["tool_calls"]
        ]
        return {**message, "content": message["content"] or content, "tool_calls": calls}

    return form


FORMS: Sequence[Form] = tuple(_formed(content, as_text) for content in ("", None) for as_text in (False, True))
"""Of messages with calls: arguments as a mapping, or as OpenAI's text; no words as "", or as nothing."""


_EXAMPLES: dict[str, Any] = {
    **{"string": "some words", "number": 1.5, "integer": 2, "boolean": True},
    **{"array": [], "object": {}},
}


def example_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the schema would take: the required ones, where it has some."""
    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    names = parameters.get("required") or list(properties)[:1]
    chosen = {}
    for name in names:
        about = properties.get(name) or {}
        kind = about.get("type")
        chosen[name] = (about.get("enum") or [_EXAMPLES.get(kind if isinstance(kind, str) else "string", "words")])[0]
    return chosen
