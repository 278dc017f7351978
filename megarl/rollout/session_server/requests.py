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
from typing import Any

import orjson

from megarl.chat_format.chat_messages import format_call
from megarl.types import Message
from megarl.utils.text import replace_surrogates

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MEDIA_TYPES = {
    **dict.fromkeys(("image_url", "input_image", "image"), "images"),
    **dict.fromkeys(("input_audio", "audio", "audio_url"), "audio"),
    **dict.fromkeys(("video_url", "video"), "videos"),
    **dict.fromkeys(("file", "input_file"), "files"),
}
"""Content part types that are not text, mapped to their names in error messages."""


class RequestRefused(Exception):
    """A refused request. `status` is the HTTP status; `param` and `code` are fields of OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def _check(is_valid: bool, where: str, problem: str, code: str | None = None) -> None:
    """Raise RequestRefused with `where` followed by `problem` unless the field at `where` is valid."""
    if not is_valid:
        raise RequestRefused(where + problem, where, code)


def normalize_messages(messages: Any) -> tuple[Message, ...]:
    """Parse and normalize the messages of a request. Raises RequestRefused if they are invalid."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestRefused("'messages' must be a list of at least one message", "messages")
    normalized: list[Message] = []
    tool_by_call_id: dict[str, str] = {}
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        normalized.append(_normalize_message(message, where, tool_by_call_id))
        tool_by_call_id |= {call["id"]: call["function"]["name"] for call in normalized[-1].get("tool_calls", ())}
    is_answered = normalized[-1]["role"] == "assistant"
    _check(not is_answered, where, ": the last message is the assistant's; there is nothing to answer")
    return tuple(normalized)


def _normalize_message(message: Any, where: str, tool_by_call_id: dict[str, str]) -> Message:
    _check(isinstance(message, dict), where, " must be an object")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    is_known = isinstance(role, str) and role in _ROLES
    _check(is_known, f"{where}.role", f" must be one of {', '.join(_ROLES)}, not {str(role)[:40]!r}")
    result: Message = {"role": _ROLES[role], "content": _join_content(content, f"{where}.content")}
    _check(message.get("audio") is None, f"{where}.audio", ": audio is not supported")
    _check(message.get("function_call") is None, f"{where}.function_call", " is deprecated; use tool_calls")
    if role == "assistant":
        if (reasoning := message.get("reasoning_content")) is not None:
            result["reasoning_content"] = _read_string(reasoning, f"{where}.reasoning_content")
        if calls is not None:
            _check(isinstance(calls, list), f"{where}.tool_calls", " must be a list")
        if calls:
            result["tool_calls"] = [_normalize_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        elif content is None:
            result["content"] = _join_content(message.get("refusal"), f"{where}.refusal")
        return result
    _check(not calls, f"{where}.tool_calls", ": only messages of the assistant call tools")
    _check(content is not None, f"{where}.content", " is missing")
    if role == "tool":
        call_id = _read_string(message.get("tool_call_id"), at := f"{where}.tool_call_id")
        _check(call_id in tool_by_call_id, at, f"={call_id[:80]!r} is of no call in the messages before it")
        result |= {"tool_call_id": call_id, "name": tool_by_call_id[call_id]}
    elif message.get("name") is not None:
        result["name"] = _read_string(message["name"], f"{where}.name")
    return result


def _join_content(content: Any, where: str) -> str:
    """Join the parts of a content into one string."""
    if content is None or isinstance(content, str):
        return content or ""
    _check(isinstance(content, list), where, " must be a string or a list of parts")
    return "".join(_read_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    media = _MEDIA_TYPES.get(kind) if isinstance(kind, str) else None
    _check(media is None, where, f": {media} ({kind}) are not supported; send text", "unsupported_content")
    _check(kind in ("text", "refusal"), f"{where}.type", f" must be 'text', not {str(kind)[:40]!r}")
    return _read_string(part.get(kind), f"{where}.{kind}")


def _normalize_call(call: Any, where: str) -> dict[str, Any]:
    function: Any = call.get("function") if isinstance(call, dict) else None
    is_function = isinstance(function, dict) and call.get("type", "function") == "function"
    _check(is_function, where, " must be an object with type 'function' and a function")
    name = _read_string(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    _check(isinstance(arguments, str | dict), f"{where}.function.arguments", " must be a string of JSON")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        arguments = replace_surrogates(json.loads(text or "{}"))
    except (ValueError, RecursionError):
        arguments = text
    call_id = _read_string(call.get("id"), f"{where}.id")
    return format_call(name, arguments, call_id)


def _read_string(value: Any, where: str) -> str:
    _check(isinstance(value, str), where, " must be a string")
    return str(value)


def normalize_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Validate the tool schemas of a request. Raises RequestRefused."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise RequestRefused("'tools' must be a list", "tools")
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        function: Any = tool.get("function") if isinstance(tool, dict) else None
        is_function = isinstance(function, dict) and tool.get("type") == "function"
        _check(is_function, where, " must be an object with type 'function' and a function")
        where += ".function"
        _check(_read_string(function.get("name"), f"{where}.name") != "", f"{where}.name", " is empty")
        _check(isinstance(function.get("parameters"), dict | None), f"{where}.parameters", " must be an object")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestRefused("two of 'tools' have the same name", "tools")
    try:
        return tuple(replace_surrogates(tools))  # checks the depth of nesting, too
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
    | {"stop", "stream", "stream_options", "logprobs", "modalities"}
)  # fmt: skip
_NO_EFFECT_FIELDS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"}
"""Fields that cannot change an answer."""
_NEUTRAL_VALUES = (
    {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "parallel_tool_calls": True, "top_logprobs": 0}
    | {"response_format": {"type": "text"}, "logit_bias": {}}
    | {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
)  # fmt: skip
"""Values with which a field has no effect, unless the run sets the field itself."""
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


def parse_request(body: bytes, model: str, params: Mapping[str, Any]) -> CompletionRequest:
    """Parse a request body. Raises RequestRefused.

    Args:
        model: name of the only model
        params: the run's sampling parameters
    """
    fields = _load_json(body)
    if not isinstance(fields, dict):
        raise RequestRefused("the body must be a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None}
    if "model" not in fields:
        raise RequestRefused(f"'model' is missing; the model is {model!r}", "model")
    if fields["model"] != model:
        requested = str(fields["model"])[:80]
        raise RequestRefused(f"the model {requested!r} does not exist; use {model!r}", "model", "model_not_found")
    for name, reason in _UNSUPPORTED_FIELDS.items():
        if name in fields:
            raise RequestRefused(f"'{name}': {reason}", name)
    if fields.get("modalities", ["text"]) != ["text"]:
        raise RequestRefused("'modalities': only text is supported", "modalities")
    messages, tools = normalize_messages(fields.get("messages")), normalize_tools(fields.get("tools"))
    choice = fields.get("tool_choice", "auto")
    if not isinstance(choice, dict) and choice not in ("auto", "none", "required"):
        raise RequestRefused("'tool_choice' must be 'none' or 'auto'; others are not supported", "tool_choice")
    options, stream = fields.get("stream_options", {}), _read_flag(fields, "stream")
    if stream and not isinstance(options, dict):
        raise RequestRefused("'stream_options' must be an object", "stream_options")
    limits = [_read_count(fields, name) for name in ("max_tokens", "max_completion_tokens") if name in fields]
    neutral = {**_NEUTRAL_VALUES, **params}
    candidates = fields.keys() - _SUPPORTED_FIELDS - _NO_EFFECT_FIELDS
    ignored = {name for name in candidates if name not in neutral or fields[name] != neutral[name]}
    return CompletionRequest(
        messages=messages,
        schemas=() if choice == "none" else tools,
        num_choices=_read_count(fields, "n", MAX_CHOICES) if "n" in fields else 1,
        max_tokens=min(limits, default=None),
        stop_strings=_read_stops(fields.get("stop", [])),
        stream=stream,
        include_usage=not stream or _read_flag(options, "include_usage"),
        logprobs=_read_flag(fields, "logprobs"),
        ignored=tuple(sorted(ignored if choice in ("auto", "none") else ignored | {"tool_choice"})),
    )


def _load_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        try:  # it accepts lone surrogates, which policies write
            return replace_surrogates(json.loads(body))
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"the body is not JSON: {str(error)[:200]}") from None


def _read_flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise RequestRefused(f"'{name}' must be true or false", name)
    return value


def _read_count(fields: Mapping[str, Any], name: str, most: int | None = None) -> int:
    value = fields[name]
    if type(value) is not int or value < 1 or (most is not None and value > most):
        upper_bound = "" if most is None else f" up to {most}"
        raise RequestRefused(f"'{name}' must be a whole number from 1{upper_bound}, not {str(value)[:40]}", name)
    return value


def _read_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestRefused("'stop' must be a string or a list of strings, none of them empty", "stop")
    if len(stops) > MAX_STOPS:
        raise RequestRefused(f"'stop' has {len(stops)} strings; at most {MAX_STOPS} are allowed", "stop")
    return tuple(stops)
