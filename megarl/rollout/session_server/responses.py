"""Responses in OpenAI's format: completions, whole or streamed, and errors.

A stream sends only text that is certain to be part of the whole answer as well.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson

from megarl.chat_format.chat_template import Chat
from megarl.engine.generation import Generation
from megarl.rollout.session_server.requests import Asked
from megarl.types import Ids, Message
from megarl.types.arrays import no_ids, no_logprobs
from megarl.utils.text import encodable

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


Field = Literal["reasoning_content", "content"]

_CALLS = re.compile(r"[<\[{`｜◁]")
"""Whatever a call of a tool may begin with, in any family."""
_HALF = "\ufffd"
"""What half of a character is read as."""


class Telling:
    """Of one answer. after: role of the message that it answers. say: is told of each piece, in order.

    Kept back are half characters, space at the end, what may become a stop string or a mark of reasoning, and where the
    client has tools, all from the first character on that a call may begin with. Where a policy that reasons has begun
    without a mark, only its end says whether that was reasoning; log-probs go with the whole: nothing is told then.
    """

    def __init__(self, chat: Chat, asked: Asked, after: str, say: Callable[[Field, str], None]) -> None:
        self._chat, self._asked, self._after, self._say = chat, asked, after, say
        self._ids: list[int] = []
        self._text = ""
        self._begin = self._read = 0
        self.sent: dict[Field, str] = {"reasoning_content": "", "content": ""}

    def hear(self, ids: Ids) -> None:
        """The next tokens of the answer."""
        if self._asked.logprobs:
            return
        self._ids += [token for token in ids.tolist() if token not in self._chat.ends]
        # As far as a character is whole, by a few tokens before it: how one is written depends on these.
        before = self._chat.text(self._ids[self._begin : self._read])
        now = self._chat.text(self._ids[self._begin :])
        if now.endswith(_HALF) or len(now) <= len(before):
            return
        self._text += now[len(before) :]
        self._begin, self._read = self._read, len(self._ids)
        thoughts, content = self._sure()
        self._tell("reasoning_content", thoughts)
        self._tell("content", content)

    def fits(self, message: Message) -> bool:
        """Whether what was told is the beginning of what the answer is now that it is whole."""
        return all(str(message.get(name) or "").startswith(sent) for name, sent in self.sent.items())

    def _tell(self, name: Field, text: str) -> None:
        more = text[len(self.sent[name]) :]
        if more:
            self.sent[name] = text
            self._say(name, more)

    def _sure(self) -> tuple[str, str]:
        """Of reasoning and content, what can become nothing else."""
        text, chat, asked = self._text, self._chat, self._asked
        found = [text.find(stop) for stop in asked.stops if stop in text]
        text = text[: min(found)] if found else _without_begun(text, asked.stops)
        if chat.marks is not None:
            text = _without_begun(text, chat.marks)
            if not chat.content_begins(text, self._after):
                return "", ""
        thoughts, content = chat.reasoned(text, self._after)
        if asked.schemas:
            if content != content.lstrip():  # a parser may leave it out
                return thoughts, ""
            called = _CALLS.search(content)
            content = content[: called.start()] if called else content
        return thoughts, content.rstrip()


def _without_begun(text: str, words: tuple[str, ...]) -> str:
    """The text without what one of the words may begin with at its end."""
    most = max((n for word in words for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
    return text[: len(text) - most]
