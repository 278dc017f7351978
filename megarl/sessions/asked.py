"""The fields of a request for a chat completion: which are followed, which are not, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from megarl.data.text import encodable
from megarl.sessions.messages import Heard, Refused, normal, normal_tools
from megarl.types import Message

MOST_CHOICES = 128
MOST_STOPS = 16

_FOLLOWED = (
    {"model", "messages", "tools", "tool_choice", "n", "max_tokens", "max_completion_tokens"}
    | {"stop", "stream", "stream_options", "logprobs"}
)  # fmt: skip
_MEANINGLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"}
"""Fields that ask for nothing that could change an answer."""
_PLAIN = (_FOLLOWED | _MEANINGLESS) - {"tool_choice"}
"""Those whose values need no look."""
_REFUSED = {
    "functions": "it is of an old form; use tools",
    "function_call": "it is of an old form; use tool_choice",
    "audio": "audio is not supported",
    "web_search_options": "there is no search",
    "prediction": "predicted outputs are not supported",
}


@dataclass(frozen=True)
class Asked:
    """A request that can be answered. limit: tokens of an answer, None where the client set none. ignored: fields of it
    that are not followed, since the run's own settings rule."""

    messages: tuple[Message, ...]
    schemas: tuple[dict[str, Any], ...] = ()
    choices: int = 1
    limit: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = True
    logprobs: bool = False
    ignored: tuple[str, ...] = ()


def read(body: bytes, model: str, params: Mapping[str, Any], heard: Heard | None = None) -> Asked:
    """A request's body. model: the one that there is. params: the run's own of sampling. heard: its client's. Raises
    Refused."""
    fields = _loaded(body)
    if not isinstance(fields, dict):
        raise Refused("the body must be a JSON object")
    given = {name: value for name, value in fields.items() if value is not None}
    if "model" not in given:
        raise Refused(f"'model' is missing; there is {model!r}", "model")
    if given["model"] != model:
        named = str(given["model"])[:80]
        raise Refused(f"the model {named!r} does not exist; there is {model!r}", "model", "model_not_found")
    for name, reason in _REFUSED.items():
        if name in given:
            raise Refused(f"'{name}': {reason}", name)
    if given.get("modalities", ["text"]) != ["text"]:
        raise Refused("'modalities': only text is supported", "modalities")
    messages, tools = normal(given.get("messages"), heard), normal_tools(given.get("tools"))
    choice = given.get("tool_choice", "auto")
    if not isinstance(choice, str | dict) or choice not in ("auto", "none", "required") and isinstance(choice, str):
        raise Refused("'tool_choice' must be 'none' or 'auto'; others are not followed", "tool_choice")
    stream = _flag(given, "stream")
    limits = [_count(given, name) for name in ("max_tokens", "max_completion_tokens") if name in given]
    return Asked(
        messages=messages,
        schemas=() if choice == "none" else tools,
        choices=_count(given, "n", MOST_CHOICES) if "n" in given else 1,
        limit=min(limits, default=None),
        stops=_stops(given.get("stop", [])),
        stream=stream,
        usage=not stream or _usage(given.get("stream_options", {})),
        logprobs=_flag(given, "logprobs"),
        ignored=tuple(sorted(_ignored(given, params))),
    )


def _loaded(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        try:  # it takes halves of characters, which policies write
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is not JSON: {str(error)[:200]}") from None


def _ignored(given: Mapping[str, Any], params: Mapping[str, Any]) -> set[str]:
    doubtful = given.keys() - _PLAIN
    if not doubtful:  # as most requests are
        return set()
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, **params}
    same = {name for name in ("temperature", "top_p", "top_k", "min_p") if given.get(name) == own[name]}
    idle: dict[str, tuple[Any, ...]] = {
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
    same |= {name for name, values in idle.items() if given.get(name) in values}
    return {str(encodable(name)) for name in doubtful - same}


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise Refused(f"'{name}' must be true or false", name)
    return value


def _count(given: Mapping[str, Any], name: str, most: int | None = None) -> int:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
        beyond = "" if most is None else f" up to {most}"
        raise Refused(f"'{name}' must be a whole number from 1{beyond}, not {str(value)[:40]}", name)
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise Refused("'stop' must be a string or a list of strings, none of them empty", "stop")
    if len(stops) > MOST_STOPS:
        raise Refused(f"'stop' has {len(stops)} strings; there may be {MOST_STOPS}", "stop")
    return tuple(encodable(stops))


def _usage(options: Any) -> bool:
    if not isinstance(options, dict):
        raise Refused("'stream_options' must be an object", "stream_options")
    return _flag(options, "include_usage")
