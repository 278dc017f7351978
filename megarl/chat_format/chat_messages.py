"""Normalize messages of tools, users and clients for a chat template, and keep control tokens out of them.

`ControlTokens` finds the control tokens of a model and those that end a turn. `EscapedEncoder` encodes messages so that
only the template contributes control tokens. `find_reasoning` splits a policy turn into reasoning and content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.data.columns import ROLES, content_text
from megarl.types import IMAGE_PLACEHOLDER, Message
from megarl.utils.text import replace_surrogates

_CONTROL_CHARS = "<>[]|{}｜"  # an added token with one of these counts as a control token, even if not declared special
_TAG = re.compile(r"</?[A-Za-z][\w:.-]*/?>")


@dataclass(frozen=True)
class ControlToken:
    """A control token in a text, spanning `start` to `stop` (exclusive)."""

    id: int
    start: int
    stop: int


class ControlTokens:
    """The control tokens of a transformers tokenizer.

    Plain words added to the vocabulary are not control tokens. *Tags* such as <think> or <tool_call>, which look like
    XML and are not declared special, are control tokens that neither open nor close a turn: prompts use them to
    describe formats.
    """

    def __init__(self, tokenizer: Any) -> None:
        text_by_id, special = {}, set()
        for index, token in tokenizer.added_tokens_decoder.items():
            text = str(token)
            if len(text) > 1 and (token.special or any(mark in text for mark in _CONTROL_CHARS)):
                text_by_id[index] = text
            if token.special:
                special.add(text)
        self.ids = frozenset(text_by_id)
        self.texts = sorted(text_by_id.values(), key=lambda text: (-len(text), text))
        self.tags = frozenset(text for text in self.texts if _TAG.fullmatch(text) and text not in special)
        self._id_by_text = {text: int(tokenizer.convert_tokens_to_ids(text)) for text in self.texts}
        self._pattern = re.compile("|".join(map(re.escape, self.texts)))
        self._tag_pattern = re.compile("|".join(re.escape(tag) for tag in self.texts if tag in self.tags))
        self._first_char_pattern = re.compile("|".join(sorted({re.escape(text[0]) for text in self.texts})))

    def find_first(self, text: str) -> ControlToken | None:
        """Find the first control token spelled in a text."""
        match = self._pattern.search(text) if self.texts else None
        return match and ControlToken(self._id_by_text[match[0]], *match.span())

    def filter_ids(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self.ids]

    def find_ids(self, text: str) -> list[int]:
        """Return the ids of the control tokens spelled in a text, in order."""
        return [self._id_by_text[spelled] for spelled in self._pattern.findall(text)] if self.texts else []

    def escape(self, text: str, tags: bool = True) -> str:
        """Insert a backslash into everything the tokenizer would read as a control token; tags only if `tags`."""
        may_contain = bool(self.texts) and self._first_char_pattern.search(text) is not None  # false for most texts
        while may_contain:
            may_contain = False
            for token in self.texts:
                if token in text and (tags or token not in self.tags):
                    text, may_contain = text.replace(token, f"{token[0]}\\{token[1:]}"), True
        return text

    def find_tags(self, text: str) -> list[str]:
        """Return the tags in a text, in order."""
        return self._tag_pattern.findall(text) if self.tags else []


def read_eos_ids(file: Path) -> tuple[int, ...]:
    """Return eos_token_id of a generation_config.json, empty without one. Raises ConfigError if it is invalid."""
    if not file.is_file():
        return ()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        eos = content.get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from None
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ConfigError(f"{file}: eos_token_id must be a token id or a list of them, not {str(eos)[:80]}")
    return tuple(ids)


_MEDIA_KEYS = ("audio", "image", "images", "video", "videos", "file", "files")
_CALL_ID_PATTERN = re.compile(r"functions\.(.+):\d+")
_REDACTED = "(withheld: the output contains control tokens)"
_DUMMY_RESULT: Message = {"role": "tool", "name": "f", "tool_call_id": "functions.f:0"}

CallFormat = Callable[[Message], Message]
"""Converts a message with calls to the form that a kind of template expects."""


def format_call_id(name: str, number: int) -> str:
    """Return the id of a conversation's call `number` in Kimi K2's format; other templates accept any."""
    return f"functions.{name}:{number}"


def format_call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    """Return a tool call as in OpenAI's messages, except that `arguments` may be a mapping."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def normalize_message(message: Message, number: int = 0) -> Message:
    """Return the message with text content and the fields that templates read for its role.

    Raises ConfigError for an invalid message or content that is not text. `number` is its index, for the error.
    """
    where = f"message {number}"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise ConfigError(f"{where} has the unknown role {str(role)[:80]!r}; roles are {', '.join(ROLES)}")
    role, content = message["role"], message.get("content")
    for name in _MEDIA_KEYS:
        if message.get(name):
            raise ConfigError(f"{where}, of role {role}, has {name!r}; only text can be trained on: write it as text")
    text = content_text(content, where) if isinstance(content, list) else "" if content is None else str(content)
    result: Message = {"role": role, "content": replace_surrogates(text)}
    if message.get("name"):
        result["name"] = replace_surrogates(str(message["name"]))
    if role == "tool":
        call_id = str(message.get("tool_call_id") or "")
        id_match = _CALL_ID_PATTERN.fullmatch(call_id)
        name = result.get("name") or (replace_surrogates(id_match[1]) if id_match else "tool")
        result |= {"name": name, "tool_call_id": replace_surrogates(call_id or format_call_id(name, 0))}
    elif role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            result["reasoning_content"] = replace_surrogates(str(reasoning))
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list | tuple):
                raise ConfigError(f"{where} has tool_calls that are not a list")
            result["tool_calls"] = [_normalize_call(call, where) for call in calls]
    return result


def _normalize_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where} calls {str(call)[:80]!r}, not {{'function': {{'name': ..., 'arguments': ...}}}}")
    name, arguments = replace_surrogates(function["name"]), replace_surrogates(function.get("arguments") or {})
    if isinstance(arguments, str):
        try:
            loaded = replace_surrogates(json.loads(arguments))
        except (ValueError, RecursionError):
            loaded = arguments
        arguments = loaded if isinstance(loaded, dict) else arguments
    call_id = replace_surrogates(str(call.get("id") or format_call_id(name, 0)))
    return format_call(name, arguments, call_id)


def escape_message(message: Message, controls: ControlTokens) -> Message:
    """Escape all control tokens in a normalized message.

    Tags are kept in content, see `ControlTokens`, but escaped in tool results, names, ids and arguments, where they
    would be mistaken for the policy's.
    """

    is_tool_result = message["role"] == "tool"
    return {
        key: value
        if key == "role"
        else controls.escape(value, tags=is_tool_result)
        if key in ("content", "reasoning_content")
        else _escape_value(value, controls)
        for key, value in message.items()
    }


def escape_schemas(schemas: Sequence[dict[str, Any]], controls: ControlTokens) -> list[dict[str, Any]]:
    """Escape control tokens but tags in tool schemas, which a client or a tool server may have written."""
    text = repr(schemas)
    if len(controls.find_ids(text)) == len(controls.find_tags(text)):  # nearly always true
        return list(schemas)
    return [_escape_value(schema, controls, tags=False) for schema in schemas]


def _escape_value(value: Any, controls: ControlTokens, tags: bool = True) -> Any:
    """Escape all strings of a JSON value."""
    if isinstance(value, str):
        return controls.escape(value, tags)
    if isinstance(value, dict):
        return {_escape_value(key, controls, tags): _escape_value(item, controls, tags) for key, item in value.items()}
    return [_escape_value(item, controls, tags) for item in value] if isinstance(value, list | tuple) else value


def redact_message(message: Message) -> Message:
    """Replace a message in which the tokenizer reads control tokens that are not spelled in it."""
    return {**(_DUMMY_RESULT if message["role"] == "tool" else message), "content": _REDACTED}


def with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with its arguments as JSON text, as OpenAI has them."""
    return {**call, "function": {**call["function"], "arguments": dump_arguments(call["function"]["arguments"])}}


def dump_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _make_call_format(content: str | None, as_text: bool) -> CallFormat:
    def form(message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        calls = [with_text_arguments(call) if as_text else call for call in message["tool_calls"]]
        return {**message, "content": message["content"] or content, "tool_calls": calls}

    return form


CALL_FORMATS: Sequence[CallFormat] = tuple(
    _make_call_format(content, as_text) for content in ("", None) for as_text in (False, True)
)
"""Forms of messages with calls: arguments are a mapping or OpenAI's text, and missing content is "" or None."""

_EXAMPLES = {"string": "some words", "number": 1.5, "integer": 2, "boolean": True, "array": [], "object": {}}


def make_example_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return valid arguments for a schema: the required ones, else the first."""
    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    arguments = {}
    for name in parameters.get("required") or list(properties)[:1]:
        property_schema = properties.get(name) or {}
        kind = property_schema.get("type")
        example = _EXAMPLES.get(kind if isinstance(kind, str) else "string", "words")
        arguments[name] = (property_schema.get("enum") or [example])[0]
    return arguments


_MAX_CACHED = 1000

RenderMessages = Callable[[Sequence[Message]], str]
"""Renders messages to text with a template."""


def _make_dummy(message: Message) -> Message:
    """Return a tool result of one digit, with the images of `message`."""
    return {**_DUMMY_RESULT, "content": "0" + IMAGE_PLACEHOLDER * str(message["content"]).count(IMAGE_PLACEHOLDER)}


class EscapedEncoder:
    """Encodes messages without control tokens from anyone but the template. `tokenize` encodes a text as is."""

    def __init__(self, controls: ControlTokens, tokenize: Callable[[str], list[int]]) -> None:
        self._controls, self._tokenize = controls, tokenize
        self._template_tokens: dict[Hashable, list[int]] = {}
        """Control tokens that the template writes around a number of tool results, by cache key."""

    def encode(
        self, messages: Sequence[Message], render: RenderMessages, cache_key: Callable[[], Hashable] | None = None
    ) -> list[int]:
        """Encode messages, rendered by `render`, with their control tokens escaped.

        Some tokenizers read control tokens where their text does not occur; such messages are redacted. `cache_key`
        returns everything besides the messages on which `render` depends; it caches messages that are all tool results.
        """
        controls = self._controls
        escaped = [
            escape_message(normalize_message(message, number), controls) for number, message in enumerate(messages)
        ]
        text = render(escaped)
        ids = self._tokenize(text)
        if controls.filter_ids(ids) != controls.find_ids(text):
            escaped = [
                redact_message(candidate)
                if candidate["role"] != "tool" and self._has_forged_tokens(candidate["content"])
                else candidate
                for candidate in escaped
            ]
            ids = self._tokenize(render(escaped))
        num_results = sum(message["role"] == "tool" for message in escaped)
        if num_results:
            key = None if cache_key is None or num_results < len(escaped) else (num_results, cache_key())
            if controls.filter_ids(ids) != self._find_template_tokens(escaped, render, key):
                escaped = [redact_message(message) if message["role"] == "tool" else message for message in escaped]
                ids = self._tokenize(render(escaped))
        return ids

    def _find_template_tokens(self, ready: Sequence[Message], render: RenderMessages, key: Hashable) -> list[int]:
        """Find the control tokens that the template writes around dummies in place of the tool results."""
        tokens = self._template_tokens.get(key)
        if tokens is None:
            dummies = [_make_dummy(message) if message["role"] == "tool" else message for message in ready]
            tokens = self._controls.filter_ids(self._tokenize(render(dummies)))
            if key is not None and len(self._template_tokens) < _MAX_CACHED:
                self._template_tokens[key] = tokens
        return tokens

    def _has_forged_tokens(self, text: str) -> bool:
        """Return whether an escaped text has control tokens other than the tags spelled in it."""
        tags = [self._tokenize(tag) for tag in self._controls.find_tags(text)]
        return self._controls.filter_ids(self._tokenize(text)) != [token for ids in tags for token in ids]


MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
"""Opening and closing marks of reasoning in the supported model families."""


@dataclass(frozen=True)
class ReasoningSpan:
    """Reasoning at the start of a turn's text: all before `stop`, and without marks `inner_start` to `inner_end`."""

    inner_start: int
    inner_end: int
    stop: int


def find_reasoning(text: str, marks: tuple[str, str], opened: bool) -> ReasoningSpan | None:
    """Find the reasoning at the start of a turn; marks further on are quotes.

    `opened` says whether the template opened the reasoning. If it did not and the turn has only a closing mark, the
    reasoning started without a mark.
    """
    opening, closing = marks
    inner_start = len(text) - len(text.lstrip())
    has_mark = text.startswith(opening, inner_start)
    inner_start = inner_start + len(opening) if has_mark else 0
    inner_end = text.find(closing, inner_start)
    if inner_end == -1:
        return ReasoningSpan(inner_start, len(text), len(text)) if has_mark or opened else None
    if not has_mark and not opened and opening in text[:inner_end]:
        return None
    return ReasoningSpan(inner_start, inner_end, inner_end + len(closing))


def is_open(text: str, marks: tuple[str, str]) -> bool:
    """Return whether a turn's text so far leaves reasoning open."""
    opening, closing = marks
    return text.rfind(opening) > text.rfind(closing)
