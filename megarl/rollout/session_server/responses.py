"""Format responses as OpenAI does: completions, whole or streamed, and errors.

A stream sends only text that is certain to be part of the final answer.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import orjson

from megarl.chat_format.chat_messages import with_text_arguments
from megarl.chat_format.chat_template import ChatTemplate
from megarl.engine.engine_protocol import Generation
from megarl.rollout.session_server.requests import CompletionRequest
from megarl.types import Ids, Message
from megarl.types.arrays import no_ids, no_logprobs
from megarl.utils.text import replace_surrogates

FinishReason = Literal["stop", "length", "tool_calls"]
KEEPALIVE = b": waiting\n\n"
"""A stream comment, which clients ignore."""


@dataclass(frozen=True)
class Choice:
    """One answer to a request.

    Attributes:
        message: as in a request, with `content` as a string
        token_texts: text of each token, if the client asked for log-probs
        num_reasoning_tokens: leading tokens that are reasoning
        num_parse_errors: tool calls that could not be parsed
    """

    message: Message
    finish_reason: FinishReason
    generation: Generation
    token_texts: tuple[str, ...] | None = None
    num_reasoning_tokens: int = 0
    num_parse_errors: int = 0


EMPTY_CHOICE = Choice(
    {"role": "assistant", "content": ""}, "length", Generation(no_ids(), no_logprobs(), "length", 0), ()
)
"""Replaces an answer beyond `rollout.max_turns`."""


@dataclass(frozen=True)
class ResponseFormat:
    """Formats the response to one request. `num_prompt_tokens` is the length of its context."""

    model: str
    num_prompt_tokens: int
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")

    def format_completion(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Format the body of a response that is not streamed."""
        formatted = [
            {
                "index": index,
                "message": {"refusal": None, **_to_openai_message(choice.message)},
                "finish_reason": choice.finish_reason,
                "logprobs": _format_logprobs(choice),
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._make_head(""), "choices": formatted, "usage": self._count_usage(choices)}

    def format_chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        """Format the next piece of choice `index` in a stream."""
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return format_event({**self._make_head(".chunk"), "choices": [choice]})

    def format_stream_end(
        self, choices: Sequence[Choice], usage: bool, sent_by_choice: Sequence[Mapping[Any, str]]
    ) -> Iterator[bytes]:
        """Format the rest of a stream. `sent_by_choice` is the text sent so far of each choice, by field."""
        for index, (choice, sent_texts) in enumerate(zip(choices, sent_by_choice, strict=True)):
            message = _to_openai_message(choice.message)
            if reasoning := str(message.get("reasoning_content") or "")[len(sent_texts["reasoning_content"]) :]:
                yield self.format_chunk(index, {"reasoning_content": reasoning})
            content = str(message["content"] or "")[len(sent_texts["content"]) :]
            if content or choice.token_texts is not None:
                yield self.format_chunk(index, {"content": content}, logprobs=_format_logprobs(choice))
            for call_index, call in enumerate(message.get("tool_calls", ())):
                yield self.format_chunk(index, {"tool_calls": [{"index": call_index, **call}]})
            yield self.format_chunk(index, {}, choice.finish_reason)
        if usage:
            yield format_event({**self._make_head(".chunk"), "choices": [], "usage": self._count_usage(choices)})
        yield b"data: [DONE]\n\n"

    def _make_head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": f"chat.completion{kind}",
            "created": int(time.time()),
            "model": self.model,
        }

    def _count_usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        num_generated = sum(len(choice.generation.token_ids) for choice in choices)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": self.num_prompt_tokens + num_generated,
        }


def format_event(value: Any) -> bytes:
    """Format an event of a stream."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def format_error(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind_by_status = {401: "authentication_error", 404: "not_found_error"}
    kind = kind_by_status.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": replace_surrogates(message), "type": kind, "param": param, "code": code}}


def _to_openai_message(message: Message) -> Message:
    """Convert a message for the client: arguments become text, and empty content null if there are calls."""
    calls = [with_text_arguments(call) for call in message.get("tool_calls", ())]
    converted = {**message, "content": message["content"] or (None if calls else "")}
    return {**converted, "tool_calls": calls} if calls else converted


def _format_logprobs(choice: Choice) -> dict[str, Any] | None:
    """Format the log-probs of every sampled token, including reasoning, calls and the end token."""
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
"""Characters with which a tool call may start, in any model family."""
_REPLACEMENT_CHAR = "\ufffd"
"""Decoded in place of an incomplete character."""


class StreamedResponse:
    """Streams one answer while it is generated.

    Only certain text is sent. Held back are incomplete characters, trailing whitespace, a possible start of a stop
    string or reasoning mark and, if the client has tools, everything from the first possible start of a call. Nothing
    is sent if the client asks for log-probs, or while only the end can tell whether a turn without an opening mark is
    reasoning.

    Args:
        after: role of the message being answered
        send: called with each piece, in order
    """

    def __init__(
        self, chat: ChatTemplate, request: CompletionRequest, after: str, send: Callable[[Field, str], None]
    ) -> None:
        self._chat, self._request, self._previous_role, self._on_text = chat, request, after, send
        self._ids: list[int] = []
        self._text = ""
        self._window_start = self._window_end = 0
        self.sent: dict[Field, str] = {"reasoning_content": "", "content": ""}

    def add_tokens(self, ids: Ids) -> None:
        """Append generated tokens and send the text that is now certain."""
        if self._request.logprobs:
            return
        self._ids += [token for token in ids.tolist() if token not in self._chat.end_token_ids]
        # Decode whole characters only, with a few tokens of context, on which their text depends.
        previous_text = self._chat.decode(self._ids[self._window_start : self._window_end])
        text = self._chat.decode(self._ids[self._window_start :])
        if text.endswith(_REPLACEMENT_CHAR) or len(text) <= len(previous_text):
            return
        self._text += text[len(previous_text) :]
        self._window_start, self._window_end = self._window_end, len(self._ids)
        fields: tuple[Field, Field] = ("reasoning_content", "content")
        for name, certain in zip(fields, self._find_certain_text(), strict=True):
            if new_text := certain[len(self.sent[name]) :]:
                self.sent[name] = certain
                self._on_text(name, new_text)

    def is_prefix_of(self, message: Message) -> bool:
        """Return whether the text sent so far is a prefix of the final message."""
        return all(str(message.get(name) or "").startswith(sent) for name, sent in self.sent.items())

    def _find_certain_text(self) -> tuple[str, str]:
        """Return the reasoning and content that no further token can change."""
        chat, request = self._chat, self._request
        text, is_stopped = cut_at_stop(self._text, request.stop_strings)
        if not is_stopped:
            text = _strip_partial_match(text, request.stop_strings)
        if chat.reasoning_marks is not None:
            text = _strip_partial_match(text, chat.reasoning_marks)
            if not chat.find_content_start(text, self._previous_role):
                return "", ""
        reasoning, content = chat.split_reasoning(text, self._previous_role)
        if request.schemas:
            if content != content.lstrip():  # a parser may drop this whitespace
                return reasoning, ""
            call_start = _CALL_START.search(content)
            content = content[: call_start.start()] if call_start else content
        return reasoning, content.rstrip()


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there is one."""
    stop = min((text.find(string) for string in stop_strings if string in text), default=None)
    return text[:stop], stop is not None


def _strip_partial_match(text: str, words: tuple[str, ...]) -> str:
    """Strip from the end what may be the start of one of the words."""
    longest = max((n for word in words for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
    return text[: len(text) - longest]
