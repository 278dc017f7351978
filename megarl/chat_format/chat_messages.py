"""Normalise messages of tools, users and clients for a chat template, and keep control tokens out of them.

`ControlTokens` finds the control tokens of a model and those that end a turn. `EscapedEncoder` encodes messages such that only the
template contributes control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.data.chat_columns import ROLES, content_text
from megarl.types import Message
from megarl.utils.text import replace_surrogates

_CONTROL_CHARS = (
    "<>[]|{}｜"  # an added token with one of these is taken for a control token, even if not declared special
)
_TAG = re.compile(r"</?[A-Za-z][\w:.-]*/?>")


@dataclass(frozen=True)
class ControlToken:
    """A control token in a text, from `start` to before `stop`."""

    id: int
    start: int
    stop: int


class ControlTokens:
    """tokenizer: of transformers.

    Words that a tokenizer merely added are no control tokens. Among these *tags* such as <think> or <tool_call>, which
    look like XML and are not declared special, open and close no turn: formats are described with them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def texts(self) -> list[str]:
        """Longest first."""
        tokens = self._tokenizer.added_tokens_decoder.values()
        texts = {str(token) for token in tokens if token.special or any(mark in str(token) for mark in _CONTROL_CHARS)}
        return sorted((text for text in texts if len(text) > 1), key=lambda text: (-len(text), text))

    @cached_property
    def tags(self) -> frozenset[str]:
        special = {str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        return frozenset(text for text in self.texts if _TAG.fullmatch(text) and text not in special)

    @cached_property
    def ids(self) -> frozenset[int]:
        texts = set(self.texts)
        return frozenset(index for index, token in self._tokenizer.added_tokens_decoder.items() if str(token) in texts)

    def find_first(self, text: str) -> ControlToken | None:
        """The first one that a text spells."""
        match = self._pattern.search(text) if self.texts else None
        return match and ControlToken(int(self._tokenizer.convert_tokens_to_ids(match[0])), *match.span())

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.texts)))

    @cached_property
    def _by_text(self) -> dict[str, int]:
        return {text: int(self._tokenizer.convert_tokens_to_ids(text)) for text in self.texts}

    @cached_property
    def _first_char_pattern(self) -> re.Pattern[str]:
        """What one of them may begin with: most texts have none of these characters."""
        return re.compile(f"[{re.escape(''.join(sorted({text[0] for text in self.texts})))}]")

    def filter_ids(self, ids: Sequence[int]) -> list[int]:
        known = self.ids
        return [token for token in ids if token in known]

    def find_ids(self, text: str) -> list[int]:
        """The ids of those that a text spells, in its order."""
        by_text = self._by_text
        return [by_text[found] for found in self._pattern.findall(text)] if by_text else []

    def escape(self, text: str, tags: bool = True) -> str:
        """The text with a backslash inside whatever the tokenizer would read as a control token. tags: in these too."""
        found = bool(self.texts) and self._first_char_pattern.search(text) is not None
        while found:
            found = False
            for token in self.texts:
                if token in text and (tags or token not in self.tags):
                    text, found = text.replace(token, f"{token[0]}\\{token[1:]}"), True
        return text

    def find_tags(self, text: str) -> list[str]:
        """The tags of a text, in its order."""
        return self._tag_pattern.findall(text) if self.tags else []

    @cached_property
    def _tag_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(tag) for tag in self.texts if tag in self.tags))


def read_eos_ids(file: Path) -> tuple[int, ...]:
    """eos_token_id of a generation_config.json, none where there is no such file. Raises ConfigError for nonsense."""
    if not file.is_file():
        return ()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        eos = found.get("eos_token_id")
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
"""A message with calls, as one kind of template takes it."""


def format_call_id(name: str, number: int) -> str:
    """Of a tool's call, the number counts all of a conversation: as Kimi K2 writes it, and others take any."""
    return f"functions.{name}:{number}"


def normalize_message(message: Message, number: int = 0) -> Message:
    """The message with its content as text and what else templates read of its role. Raises ConfigError for what is no
    message, or holds what is not text. number: in its list, for the error."""
    where = f"message {number}"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise ConfigError(f"{where} has the unknown role {str(role)[:80]!r}; roles are {', '.join(ROLES)}")
    role, content = message["role"], message.get("content")
    for name in _MEDIA_KEYS:
        if message.get(name):
            raise ConfigError(f"{where}, of role {role}, has {name!r}; only text can be trained on: say it in words")
    text = content_text(content, where) if isinstance(content, list) else "" if content is None else str(content)
    found: Message = {"role": role, "content": replace_surrogates(text)}
    if message.get("name"):
        found["name"] = replace_surrogates(str(message["name"]))
    if role == "tool":
        own = str(message.get("tool_call_id") or "")
        named = _CALL_ID_PATTERN.fullmatch(own)
        name = found.get("name") or (replace_surrogates(named[1]) if named else "tool")
        found |= {"name": name, "tool_call_id": replace_surrogates(own or format_call_id(name, 0))}
    elif role == "assistant":
        thought = message.get("reasoning_content") or message.get("reasoning")
        if thought:
            found["reasoning_content"] = replace_surrogates(str(thought))
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list | tuple):
                raise ConfigError(f"{where} has tool_calls that are no list")
            found["tool_calls"] = [_normalize_call(call, where) for call in calls]
    return found


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
    own = replace_surrogates(str(call.get("id") or format_call_id(name, 0)))
    return {"id": own, "type": "function", "function": {"name": name, "arguments": arguments}}


def escape_message(message: Message, controls: ControlTokens) -> Message:
    """A plain message in which others than the template have written no control tokens. Tags stay, see `ControlTokens`, but
    for what a tool says, and in names, ids and arguments: there they would be taken for the policy's."""

    strict = message["role"] == "tool"
    return {
        key: value
        if key == "role"
        else controls.escape(value, tags=strict)
        if key in ("content", "reasoning_content")
        else _escape_value(value, controls)
        for key, value in message.items()
    }


def escape_schemas(schemas: Sequence[dict[str, Any]], controls: ControlTokens) -> list[dict[str, Any]]:
    """Schemas in which there are no control tokens: a client or a server of tools may have described them. Tags stay,
    as in `escape_message`."""
    text = repr(schemas)
    if len(controls.find_ids(text)) == len(controls.find_tags(text)):  # as nearly always
        return list(schemas)
    return [_escape_value(schema, controls, tags=False) for schema in schemas]


def _escape_value(value: Any, controls: ControlTokens, tags: bool = True) -> Any:
    """A value as of JSON, with all of its texts escaped."""
    if isinstance(value, str):
        return controls.escape(value, tags)
    if isinstance(value, dict):
        return {_escape_value(key, controls, tags): _escape_value(item, controls, tags) for key, item in value.items()}
    return [_escape_value(item, controls, tags) for item in value] if isinstance(value, list | tuple) else value


def blank_result(message: Message) -> Message:
    """In place of a tool's result one that says nothing: what the template itself writes is of the same tokens."""
    return {**_DUMMY_RESULT, "content": "0"} if message["role"] == "tool" else message


def redact_message(message: Message) -> Message:
    """In place of a message in which a tokenizer reads control tokens that it does not spell."""
    return {**(_DUMMY_RESULT if message["role"] == "tool" else message), "content": _REDACTED}


def _dump_arguments(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _make_call_format(content: str | None, as_text: bool) -> CallFormat:
    def form(message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": _dump_arguments(call["function"]["arguments"])}}
            if as_text and not isinstance(call["function"]["arguments"], str)
            else call
            for call in message["tool_calls"]
        ]
        return {**message, "content": message["content"] or content, "tool_calls": calls}

    return form


CALL_FORMATS: Sequence[CallFormat] = tuple(
    _make_call_format(content, as_text) for content in ("", None) for as_text in (False, True)
)
"""Of messages with calls: arguments as a mapping, or as OpenAI's text; no words as "", or as nothing."""


_EXAMPLES: dict[str, Any] = {
    **{"string": "some words", "number": 1.5, "integer": 2, "boolean": True},
    **{"array": [], "object": {}},
}


def make_example_arguments(schema: dict[str, Any]) -> dict[str, Any]:
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


_MAX_CACHED = 1000

RenderMessages = Callable[[Sequence[Message]], str]
"""What a template writes of messages."""


class EscapedEncoder:
    """tokenise: of a text, with whatever control tokens it spells."""

    def __init__(self, controls: ControlTokens, tokenise: Callable[[str], list[int]]) -> None:
        self._controls, self._tokenise = controls, tokenise
        self._template_tokens: dict[Hashable, list[int]] = {}
        """Control tokens that the template itself writes around so many results."""

    def encode(
        self, messages: Sequence[Message], make: RenderMessages, way: Callable[[], Hashable] | None = None
    ) -> list[int]:
        """Some tokenizers read control tokens where their text is not: what others say is withheld then. way: all that
        `make` depends on besides the messages, where what it makes of so many results alone is asked for again."""
        controls = self._controls
        ready = [
            escape_message(normalize_message(message, number), controls) for number, message in enumerate(messages)
        ]
        text = make(ready)
        ids = self._tokenise(text)
        if controls.filter_ids(ids) != controls.find_ids(text):
            ready = [
                redact_message(one) if one["role"] != "tool" and self._has_forged_tokens(one["content"]) else one
                for one in ready
            ]
            ids = self._tokenise(make(ready))
        results = sum(message["role"] == "tool" for message in ready)
        if results:
            key = None if way is None or results < len(ready) else (results, way())
            if controls.filter_ids(ids) != self._find_template_tokens(ready, make, key):
                ready = [redact_message(message) if message["role"] == "tool" else message for message in ready]
                ids = self._tokenise(make(ready))
        return ids

    def _find_template_tokens(self, ready: Sequence[Message], make: RenderMessages, key: Hashable) -> list[int]:
        frame = self._template_tokens.get(key)
        if frame is None:
            frame = self._controls.filter_ids(self._tokenise(make([blank_result(message) for message in ready])))
            if key is not None and len(self._template_tokens) < _MAX_CACHED:
                self._template_tokens[key] = frame
        return frame

    def _has_forged_tokens(self, text: str) -> bool:
        """Whether a text that is escaped has control tokens but for the tags that it spells."""
        tags = [self._tokenise(tag) for tag in self._controls.find_tags(text)]
        return self._controls.filter_ids(self._tokenise(text)) != [token for ids in tags for token in ids]
