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

from megarl.chat_format.chat_template import ChatTemplate
from megarl.engine.generation import Generation
from megarl.rollout.session_server.requests import CompletionRequest
from megarl.types import Ids, Message
from megarl.types.arrays import no_ids, no_logprobs
from megarl.utils.text import replace_surrogates

FinishReason = Literal["stop", "length", "tool_calls"]
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": waiting\n\n"
"""Says nothing, in a stream."""


@dataclass(frozen=True)
class Choice:
    """An answer. message: as in `messages`, with `content` as a string. spelled: the text of each of its tokens, where
    the client asked for log-probs. thought: of its tokens, those at the beginning that are reasoning. errors: calls in
    it that could not be read."""

    message: Message
    finish_reason: FinishReason
    generation: Generation
    token_texts: tuple[str, ...] | None = None
    num_reasoning_tokens: int = 0
    num_parse_errors: int = 0


EMPTY_CHOICE = Choice(
    {"role": "assistant", "content": ""}, "length", Generation(no_ids(), no_logprobs(), "length", 0), ()
)
"""In place of an answer that the policy may not give."""


@dataclass(frozen=True)
class CompletionResponse:
    """All answers to a request. asked: tokens that it became; id: its own."""

    id: str
    model: str
    num_prompt_tokens: int
    choices: tuple[Choice, ...]

    def usage(self) -> dict[str, int]:
        written = sum(len(choice.generation.token_ids) for choice in self.choices)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.num_prompt_tokens + written,
        }


def format_completion(answered: CompletionResponse) -> bytes:
    """The body of an answer that is not streamed."""
    choices = [
        {
            "index": index,
            "message": {"refusal": None, **_to_openai_message(choice.message)},
            "finish_reason": choice.finish_reason,
            "logprobs": _format_logprobs(choice),
        }
        for index, choice in enumerate(answered.choices)
    ]
    return orjson.dumps({**_make_head(answered.id, answered.model, ""), "choices": choices, "usage": answered.usage()})


def format_stream_start(own: str, model: str, choices: int) -> Iterator[bytes]:
    """What a stream of so many answers begins with."""
    for index in range(choices):
        yield _format_chunk(own, model, index, {"role": "assistant", "content": ""})


def format_delta(own: str, model: str, index: int, field: str, text: str) -> bytes:
    """More of an answer that is being written."""
    return _format_chunk(own, model, index, {field: text})


def format_stream_end(answered: CompletionResponse, usage: bool, sent: Sequence[Mapping[Any, str]]) -> Iterator[bytes]:
    """What a stream ends with. sent: what has gone out of each answer, by field."""
    own, model = answered.id, answered.model
    for index, (choice, gone) in enumerate(zip(answered.choices, sent, strict=True)):
        message = _to_openai_message(choice.message)
        if thoughts := str(message.get("reasoning_content") or "")[len(gone["reasoning_content"]) :]:
            yield _format_chunk(own, model, index, {"reasoning_content": thoughts})
        content = str(message["content"] or "")[len(gone["content"]) :]
        if content or choice.token_texts is not None:
            yield _format_chunk(own, model, index, {"content": content}, logprobs=_format_logprobs(choice))
        for number, call in enumerate(message.get("tool_calls", ())):
            yield _format_chunk(own, model, index, {"tool_calls": [{"index": number, **call}]})
        yield _format_chunk(own, model, index, {}, choice.finish_reason)
    if usage:
        yield _format_event({**_make_head(own, model, ".chunk"), "choices": [], "usage": answered.usage()})
    yield DONE


def format_error(message: str, status: int, param: str | None = None, code: str | None = None) -> bytes:
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return orjson.dumps({"error": {"message": replace_surrogates(message), "type": kind, "param": param, "code": code}})


def format_error_event(message: str) -> bytes:
    """An error in a stream that has begun."""
    return b"data: " + format_error(message, 500) + b"\n\n"


def new_id() -> str:
    """Of an answer."""
    return f"chatcmpl-{secrets.token_hex(12)}"


def format_model(name: str) -> bytes:
    return orjson.dumps(_model_object(name))


def format_models(name: str) -> bytes:
    return orjson.dumps({"object": "list", "data": [_model_object(name)]})


def _model_object(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}


def _make_head(own: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": own, "object": f"chat.completion{kind}", "created": int(time.time()), "model": model}


def _format_event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _format_chunk(
    own: str, model: str, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None
) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return _format_event({**_make_head(own, model, ".chunk"), "choices": [choice]})


def _to_openai_message(message: Message) -> Message:
    """A message of the assistant as clients know it: arguments are text, and no content is null."""
    calls = [
        {**call, "function": {**call["function"], "arguments": dump_arguments(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    outward = {**message, "content": message["content"] or (None if calls else "")}
    return {**outward, "tool_calls": calls} if calls else outward


def dump_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _format_logprobs(choice: Choice) -> dict[str, Any] | None:
    """Of every token that was sampled, also of reasoning, calls and the end of the turn."""
    if choice.token_texts is None:
        return None
    values: Sequence[float] = np.asarray(choice.generation.logprobs, np.float64).tolist()
    content = [
        {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
        for token, value in zip(choice.token_texts, values, strict=True)
    ]
    return {"content": content, "refusal": None}


Field = Literal["reasoning_content", "content"]

_CALL_START = re.compile(r"[<\[{`｜◁]")
"""Whatever a call of a tool may begin with, in any family."""
_REPLACEMENT_CHAR = "\ufffd"
"""What half of a character is read as."""


class StreamedResponse:
    """Of one answer. after: role of the message that it answers. say: is told of each piece, in order.

    Kept back are half characters, space at the end, what may become a stop string or a mark of reasoning, and where the
    client has tools, all from the first character on that a call may begin with. Where a policy that reasons has begun
    without a mark, only its end says whether that was reasoning; log-probs go with the whole: nothing is told then.
    """

    def __init__(
        self, chat: ChatTemplate, asked: CompletionRequest, after: str, say: Callable[[Field, str], None]
    ) -> None:
        self._chat, self._request, self._previous_role, self._on_text = chat, asked, after, say
        self._ids: list[int] = []
        self._text = ""
        self._window_start = self._window_end = 0
        self.sent: dict[Field, str] = {"reasoning_content": "", "content": ""}

    def add_tokens(self, ids: Ids) -> None:
        """The next tokens of the answer."""
        if self._request.logprobs:
            return
        self._ids += [token for token in ids.tolist() if token not in self._chat.end_token_ids]
        # As far as a character is whole, by a few tokens before it: how one is written depends on these.
        before = self._chat.decode(self._ids[self._window_start : self._window_end])
        now = self._chat.decode(self._ids[self._window_start :])
        if now.endswith(_REPLACEMENT_CHAR) or len(now) <= len(before):
            return
        self._text += now[len(before) :]
        self._window_start, self._window_end = self._window_end, len(self._ids)
        thoughts, content = self._find_certain_text()
        self._send("reasoning_content", thoughts)
        self._send("content", content)

    def is_prefix_of(self, message: Message) -> bool:
        """Whether what was told is the beginning of what the answer is now that it is whole."""
        return all(str(message.get(name) or "").startswith(sent) for name, sent in self.sent.items())

    def _send(self, name: Field, text: str) -> None:
        more = text[len(self.sent[name]) :]
        if more:
            self.sent[name] = text
            self._on_text(name, more)

    def _find_certain_text(self) -> tuple[str, str]:
        """Of reasoning and content, what can become nothing else."""
        text, chat, asked = self._text, self._chat, self._request
        found = [text.find(stop) for stop in asked.stop_strings if stop in text]
        text = text[: min(found)] if found else _strip_partial_match(text, asked.stop_strings)
        if chat.reasoning_marks is not None:
            text = _strip_partial_match(text, chat.reasoning_marks)
            if not chat.find_content_start(text, self._previous_role):
                return "", ""
        thoughts, content = chat.split_reasoning(text, self._previous_role)
        if asked.schemas:
            if content != content.lstrip():  # a parser may leave it out
                return thoughts, ""
            called = _CALL_START.search(content)
            content = content[: called.start()] if called else content
        return thoughts, content.rstrip()


def _strip_partial_match(text: str, words: tuple[str, ...]) -> str:
    """The text without what one of the words may begin with at its end."""
    most = max((n for word in words for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
    return text[: len(text) - most]
