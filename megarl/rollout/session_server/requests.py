"""Parse requests of OpenAI's chat completions API: check fields and normalize messages.

A normalized message has a role (system, user, assistant or tool) and a string as content. Its tool calls have an id, a
name and arguments, which are a mapping if they were a JSON object. Fields that no template knows are dropped. Two
messages are the same if their normalized forms are equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import orjson

from megarl.types import Message
from megarl.utils.text import replace_surrogates

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MEDIA_TYPES = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "audio": "audio",
    "audio_url": "audio",
    "video_url": "videos",
    "video": "videos",
    "file": "files",
    "input_file": "files",
}
"""Content part types that are not text, mapped to their names in error messages."""


class RequestRefused(Exception):
    """A refused request. `status` is the HTTP status; `param` and `code` are fields of OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class MessageCache:
    """The previous request of a client.

    Clients send the whole conversation each time; the unchanged prefix is neither parsed nor hashed again.
    """

    def __init__(self) -> None:
        self._raw_messages: list[Any] = []
        self._messages: tuple[Message, ...] = ()
        self._hashed_messages: tuple[Message, ...] = ()
        self._prefix_digests: list[Digest] = []

    def match_prefix(self, messages: Sequence[Any]) -> tuple[Message, ...]:
        """Return the normalized prefix that these messages share with the previous request.

        The prefix ends at a call whose arguments are not a string: numbers and booleans may be equal without being
        identical.
        """
        count = 0
        for message, cached in zip(messages, self._raw_messages, strict=False):
            if message != cached or not all(
                isinstance(call["function"]["arguments"], str) for call in cached.get("tool_calls") or ()
            ):
                break
            count += 1
        return self._messages[:count]

    def store(self, messages: Sequence[Any], normalized: tuple[Message, ...]) -> None:
        self._raw_messages, self._messages = list(messages), normalized

    def hash_prefixes(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> list[Digest]:
        """Like the function `hash_prefixes`, but reuse digests of the previous request."""
        digests = [_digest(list(schemas))]
        if self._prefix_digests and self._prefix_digests[0] == digests[0]:
            shared = takewhile(lambda pair: pair[0] is pair[1], zip(messages, self._hashed_messages, strict=False))
            digests = self._prefix_digests[: 1 + sum(1 for _ in shared)]
        for message in messages[len(digests) - 1 :]:
            digests.append(extend_digest(digests[-1], message))
        self._hashed_messages, self._prefix_digests = tuple(messages), digests
        return digests


def normalize_messages(messages: Any, cache: MessageCache | None = None) -> tuple[Message, ...]:
    """Parse and normalize the messages of a request. Raises RequestRefused if they are invalid.

    `cache` caches the client's previous request.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestRefused("'messages' must be a list of at least one message", "messages")
    normalized: list[Message] = [] if cache is None else list(cache.match_prefix(messages))
    names = {call["id"]: call["function"]["name"] for parsed in normalized for call in parsed.get("tool_calls", ())}
    for number, message in enumerate(messages[len(normalized) :], len(normalized)):
        parsed = _normalize_message(message, f"messages[{number}]", names)
        names |= {call["id"]: call["function"]["name"] for call in parsed.get("tool_calls", ())}
        normalized.append(parsed)
    if normalized[-1]["role"] == "assistant":
        at = f"messages[{len(normalized) - 1}]"
        raise RequestRefused(f"{at}: the last message is the assistant's; there is nothing to answer", at)
    if cache is not None:
        cache.store(messages, tuple(normalized))
    return tuple(normalized)


def _normalize_message(message: Any, where: str, names: dict[str, str]) -> Message:
    """Normalize one message. `names` maps the ids of earlier calls to their tools."""
    if not isinstance(message, dict):
        raise RequestRefused(f"{where} must be an object", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestRefused(
            f"{where}.role must be one of {', '.join(_ROLES)}, not {str(role)[:40]!r}", f"{where}.role"
        )
    result: Message = {"role": _ROLES[role], "content": _join_content(message.get("content"), f"{where}.content")}
    if message.get("audio") is not None:
        raise RequestRefused(f"{where}.audio: audio is not supported", f"{where}.audio")
    if message.get("function_call") is not None:
        raise RequestRefused(f"{where}.function_call is deprecated; use tool_calls", f"{where}.function_call")
    calls = message.get("tool_calls")
    if role == "assistant":
        reasoning = message.get("reasoning_content")
        if reasoning is not None:
            result["reasoning_content"] = _read_string(reasoning, f"{where}.reasoning_content")
        if calls is not None:
            if not isinstance(calls, list):
                raise RequestRefused(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
            if calls:
                result["tool_calls"] = [
                    _normalize_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
                ]
        if message.get("content") is None and not result.get("tool_calls"):
            result["content"] = str(_join_content(message.get("refusal"), f"{where}.refusal"))
        return result
    if calls:
        raise RequestRefused(f"{where}.tool_calls: only messages of the assistant call tools", f"{where}.tool_calls")
    if message.get("content") is None:
        raise RequestRefused(f"{where}.content is missing", f"{where}.content")
    if role == "tool":
        call_id = _read_string(message.get("tool_call_id"), f"{where}.tool_call_id")
        if call_id not in names:
            raise RequestRefused(
                f"{where}.tool_call_id={call_id[:80]!r} is of no call in the messages before it",
                f"{where}.tool_call_id",
            )
        result |= {"tool_call_id": call_id, "name": names[call_id]}
    elif message.get("name") is not None:
        result["name"] = _read_string(message["name"], f"{where}.name")
    return result


def _join_content(content: Any, where: str) -> str:
    """Join the parts of a content into one string."""
    if content is None:
        return ""
    if isinstance(content, str):
        return str(replace_surrogates(content))
    if not isinstance(content, list):
        raise RequestRefused(f"{where} must be a string or a list of parts", where)
    return "".join(_read_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return str(replace_surrogates(part))
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _MEDIA_TYPES:
        raise RequestRefused(
            f"{where}: {_MEDIA_TYPES[kind]} ({kind}) are not supported; send text", where, "unsupported_content"
        )
    if kind not in ("text", "refusal"):
        raise RequestRefused(f"{where}.type must be 'text', not {str(kind)[:40]!r}", f"{where}.type")
    return _read_string(part.get(kind), f"{where}.{kind}")


def _normalize_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise RequestRefused(f"{where} must be an object with type 'function' and a function", where)
    name = _read_string(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments)
    elif not isinstance(arguments, dict):
        raise RequestRefused(f"{where}.function.arguments must be a string of JSON", f"{where}.function.arguments")
    else:
        arguments = parse_arguments(json.dumps(arguments))
    call_id = _read_string(call.get("id"), f"{where}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parse_arguments(arguments: str) -> Any:
    """Parse arguments as JSON; return the text unchanged if it is invalid."""
    try:
        return replace_surrogates(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return replace_surrogates(arguments)


def _read_string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestRefused(f"{where} must be a string", where)
    return str(replace_surrogates(value))


def normalize_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Validate the tool schemas of a request. Raises RequestRefused."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise RequestRefused("'tools' must be a list", "tools")
    for number, tool in enumerate(tools):
        at = f"tools[{number}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise RequestRefused(f"{at} must be an object with type 'function' and a function", at)
        if not _read_string(function.get("name"), f"{at}.function.name"):
            raise RequestRefused(f"{at}.function.name is empty", f"{at}.function.name")
        if not isinstance(function.get("parameters"), dict | None):
            raise RequestRefused(f"{at}.function.parameters must be an object", f"{at}.function.parameters")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestRefused("two of 'tools' have the same name", "tools")
    try:
        return tuple(replace_surrogates(tools))
    except ValueError as error:
        raise RequestRefused(f"'tools' cannot be read: {error}", "tools") from None


Digest = bytes
"""Hash of a message history; equal histories have equal digests."""


def hash_prefixes(messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> list[Digest]:
    """Return digests of all prefixes under these tools; entry k is for the first k messages."""
    digests = [_digest(list(schemas))]
    for message in messages:
        digests.append(extend_digest(digests[-1], message))
    return digests


def extend_digest(history: Digest, message: Message) -> Digest:
    """Return the digest of a history plus one message.

    For assistant messages it ignores surrounding whitespace, which clients strip; reasoning, which most clients drop;
    call ids; and the JSON formatting of arguments.
    """
    if message["role"] == "assistant":
        calls = [call["function"] for call in message.get("tool_calls", ())]
        fields = [message["content"].strip(), [[call["name"], call["arguments"]] for call in calls]]
    else:
        fields = [message["content"], message.get("name"), message.get("tool_call_id")]
    return _digest([history.hex(), message["role"], *fields])


def _digest(value: Any) -> Digest:
    try:
        encoded = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # an integer of more than 64 bits
        encoded = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(encoded, digest_size=16).digest()


MAX_CHOICES = 128
MAX_STOPS = 16

_SUPPORTED_FIELDS = (
    {"model", "messages", "tools", "tool_choice", "n", "max_tokens", "max_completion_tokens"}
    | {"stop", "stream", "stream_options", "logprobs"}
)  # fmt: skip
_NO_EFFECT_FIELDS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"}
"""Fields that cannot change an answer."""
_ACCEPTED_FIELDS = (_SUPPORTED_FIELDS | _NO_EFFECT_FIELDS) - {"tool_choice"}
"""Fields accepted with any value."""
_UNSUPPORTED_FIELDS = {
    "functions": "it is deprecated; use tools",
    "function_call": "it is deprecated; use tool_choice",
    "audio": "audio is not supported",
    "web_search_options": "search is not supported",
    "prediction": "predicted outputs are not supported",
}


@dataclass(frozen=True)
class CompletionRequest:
    """A valid request.

    Attributes:
        max_tokens: limit on the tokens of an answer, None if the client set none
        ignored: fields that are ignored because the run's own settings apply
    """

    messages: tuple[Message, ...]
    schemas: tuple[dict[str, Any], ...] = ()
    num_choices: int = 1
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = True
    logprobs: bool = False
    ignored: tuple[str, ...] = ()


def parse_request(
    body: bytes, model: str, params: Mapping[str, Any], cache: MessageCache | None = None
) -> CompletionRequest:
    """Parse a request body. Raises RequestRefused.

    Args:
        model: name of the only model
        params: the run's sampling parameters
        cache: the client's message cache
    """
    fields = _load_json(body)
    if not isinstance(fields, dict):
        raise RequestRefused("the body must be a JSON object")
    present = {name: value for name, value in fields.items() if value is not None}
    if "model" not in present:
        raise RequestRefused(f"'model' is missing; the model is {model!r}", "model")
    if present["model"] != model:
        requested = str(present["model"])[:80]
        raise RequestRefused(f"the model {requested!r} does not exist; use {model!r}", "model", "model_not_found")
    for name, reason in _UNSUPPORTED_FIELDS.items():
        if name in present:
            raise RequestRefused(f"'{name}': {reason}", name)
    if present.get("modalities", ["text"]) != ["text"]:
        raise RequestRefused("'modalities': only text is supported", "modalities")
    messages, tools = normalize_messages(present.get("messages"), cache), normalize_tools(present.get("tools"))
    choice = present.get("tool_choice", "auto")
    if not isinstance(choice, str | dict) or choice not in ("auto", "none", "required") and isinstance(choice, str):
        raise RequestRefused("'tool_choice' must be 'none' or 'auto'; others are not supported", "tool_choice")
    stream = _read_flag(present, "stream")
    limits = [_read_count(present, name) for name in ("max_tokens", "max_completion_tokens") if name in present]
    return CompletionRequest(
        messages=messages,
        schemas=() if choice == "none" else tools,
        num_choices=_read_count(present, "n", MAX_CHOICES) if "n" in present else 1,
        max_tokens=min(limits, default=None),
        stop_strings=_read_stops(present.get("stop", [])),
        stream=stream,
        include_usage=not stream or _read_include_usage(present.get("stream_options", {})),
        logprobs=_read_flag(present, "logprobs"),
        ignored=tuple(sorted(_find_ignored(present, params))),
    )


def _load_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        try:  # it accepts lone surrogates, which policies write
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"the body is not JSON: {str(error)[:200]}") from None


def _find_ignored(fields: Mapping[str, Any], params: Mapping[str, Any]) -> set[str]:
    candidates = fields.keys() - _ACCEPTED_FIELDS
    if not candidates:  # true for most requests
        return set()
    effective = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, **params}
    without_effect = {
        name for name in ("temperature", "top_p", "top_k", "min_p") if fields.get(name) == effective[name]
    }
    neutral_values: dict[str, tuple[Any, ...]] = {
        "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (True,),
        "top_logprobs": (0,),
        "response_format": ({"type": "text"},),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "modalities": (["text"],),
    }
    without_effect |= {name for name, values in neutral_values.items() if fields.get(name) in values}
    return {str(replace_surrogates(name)) for name in candidates - without_effect}


def _read_flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise RequestRefused(f"'{name}' must be true or false", name)
    return value


def _read_count(fields: Mapping[str, Any], name: str, most: int | None = None) -> int:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
        upper_bound = "" if most is None else f" up to {most}"
        raise RequestRefused(f"'{name}' must be a whole number from 1{upper_bound}, not {str(value)[:40]}", name)
    return value


def _read_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestRefused("'stop' must be a string or a list of strings, none of them empty", "stop")
    if len(stops) > MAX_STOPS:
        raise RequestRefused(f"'stop' has {len(stops)} strings; at most {MAX_STOPS} are allowed", "stop")
    return tuple(replace_surrogates(stops))


def _read_include_usage(options: Any) -> bool:
    if not isinstance(options, dict):
        raise RequestRefused("'stream_options' must be an object", "stream_options")
    return _read_flag(options, "include_usage")
