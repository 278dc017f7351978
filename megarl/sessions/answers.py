"""What clients get: chat completions, whole or as a stream of events, and errors, in OpenAI's form."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson

from megarl.data.text import encodable
from megarl.rollout.policy import Generation
from megarl.types import Message
from megarl.types.arrays import no_ids, no_logprobs

Finish = Literal["stop", "length", "tool_calls"]
DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
"""Says nothing, in a stream."""


@dataclass(frozen=True)
class Choice:
    """An answer. message: as in `messages`, with `content` as a string. spelled: the text of each of its tokens, where
    the client asked for log-probs. thought: of its tokens, those at the beginning that are reasoning. errors: calls in
    it that could not be read."""

    message: Message
    finish: Finish
    said: Generation
    spelled: tuple[str, ...] | None = None
    thought: int = 0
    errors: int = 0


NOTHING = Choice({"role": "assistant", "content": ""}, "length", Generation(no_ids(), no_logprobs(), "length", 0), ())
"""In place of an answer that the policy may not give."""


@dataclass(frozen=True)
class Answered:
    """All answers to a request. asked: tokens that it became; id: its own."""

    id: str
    model: str
    asked: int
    choices: tuple[Choice, ...]

    def usage(self) -> dict[str, int]:
        written = sum(len(choice.said.token_ids) for choice in self.choices)
        return {"prompt_tokens": self.asked, "completion_tokens": written, "total_tokens": self.asked + written}


def completion(answered: Answered) -> bytes:
    """The body of an answer that is not streamed."""
    choices = [
        {
            "index": index,
            "message": {"refusal": None, **_outward(choice.message)},
            "finish_reason": choice.finish,
            "logprobs": _logprobs(choice),
        }
        for index, choice in enumerate(answered.choices)
    ]
    return orjson.dumps({**_head(answered.id, answered.model, ""), "choices": choices, "usage": answered.usage()})


def heads(own: str, model: str, choices: int) -> Iterator[bytes]:
    """What a stream of so many answers begins with."""
    for index in range(choices):
        yield _chunk(own, model, index, {"role": "assistant", "content": ""})


def piece(own: str, model: str, index: int, field: str, text: str) -> bytes:
    """More of an answer that is being written."""
    return _chunk(own, model, index, {field: text})


def rest(answered: Answered, usage: bool, sent: Sequence[Mapping[Any, str]]) -> Iterator[bytes]:
    """What a stream ends with. sent: what has gone out of each answer, by field."""
    own, model = answered.id, answered.model
    for index, (choice, gone) in enumerate(zip(answered.choices, sent, strict=True)):
        message = _outward(choice.message)
        if thoughts := str(message.get("reasoning_content") or "")[len(gone["reasoning_content"]) :]:
            yield _chunk(own, model, index, {"reasoning_content": thoughts})
        content = str(message["content"] or "")[len(gone["content"]) :]
        if content or choice.spelled is not None:
            yield _chunk(own, model, index, {"content": content}, logprobs=_logprobs(choice))
        for number, call in enumerate(message.get("tool_calls", ())):
            yield _chunk(own, model, index, {"tool_calls": [{"index": number, **call}]})
        yield _chunk(own, model, index, {}, choice.finish)
    if usage:
        yield _event({**_head(own, model, ".chunk"), "choices": [], "usage": answered.usage()})
    yield DONE


def error(message: str, status: int, param: str | None = None, code: str | None = None) -> bytes:
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return orjson.dumps({"error": {"message": encodable(message), "type": kind, "param": param, "code": code}})


def error_event(message: str) -> bytes:
    """An error in a stream that has begun."""
    return b"data: " + error(message, 500) + b"\n\n"


def new_id() -> str:
    """Of an answer."""
    return f"chatcmpl-{secrets.token_hex(12)}"


def model(name: str) -> bytes:
    return orjson.dumps(_model(name))


def models(name: str) -> bytes:
    return orjson.dumps({"object": "list", "data": [_model(name)]})


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}


def _head(own: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": own, "object": f"chat.completion{kind}", "created": int(time.time()), "model": model}


def _event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _chunk(
    own: str, model: str, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None
) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return _event({**_head(own, model, ".chunk"), "choices": [choice]})


def _outward(message: Message) -> Message:
    """A message of the assistant as clients know it: arguments are text, and no content is null."""
    calls = [
        {**call, "function": {**call["function"], "arguments": as_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    outward = {**message, "content": message["content"] or (None if calls else "")}
    return {**outward, "tool_calls": calls} if calls else outward


def as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    """Of every token that was sampled, also of reasoning, calls and the end of the turn."""
    if choice.spelled is None:
        return None
    values: Sequence[float] = np.asarray(choice.said.logprobs, np.float64).tolist()
    content = [
        {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
        for token, value in zip(choice.spelled, values, strict=True)
    ]
    return {"content": content, "refusal": None}
