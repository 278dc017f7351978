"""Messages to ids, and ids to messages: what is behind a turn of the policy, and what its turn says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.chat_format.chat_messages import format_call_id
from megarl.chat_format.chat_template import ChatTemplate
from megarl.chat_format.observations import count_reserved_tokens, truncate_observations
from megarl.chat_format.reasoning import is_open
from megarl.config import ConfigError, RolloutConfig
from megarl.engine.generation import Generation
from megarl.engine.tool_calls import ParsedResponse, ParseFunction, ToolCall
from megarl.rollout.session_server.requests import CompletionRequest
from megarl.rollout.session_server.responses import Choice, dump_arguments
from megarl.rollout.session_server.token_tree import Node, Schemas
from megarl.types import Ids, Message, as_token_ids

_MAX_MARK_TOKENS = 16
"""Tokens within which the head of a turn opens reasoning."""


_CHUNK_CHARS = 1 << 14
"""Characters of a flood that are read at a time."""
_CHARS_PER_TOKEN = 8
"""Characters of a token, or fewer, in nearly all texts."""
_SPLIT_TOKENS = 16
"""Tokens that tearing a text in two may add, with room to spare."""


class ContextOverflow(Exception):
    """Messages leave the policy no room. tokens: that they are, in words, with what stands before them."""

    def __init__(self, tokens: str) -> None:
        super().__init__(tokens)
        self.tokens = tokens


@dataclass(frozen=True)
class RenderedMessages:
    """Messages as the policy reads them. ids: that they became. cut: results among them that are cut."""

    ids: Ids
    messages: tuple[Message, ...]
    num_truncated: int = 0


class MessageRenderer:
    """By a chat, and a parser of what it calls. What it finds out of the template it keeps."""

    def __init__(self, chat: ChatTemplate, parse: ParseFunction) -> None:
        self.chat, self._parse = chat, parse
        self._drop_by_pattern: dict[tuple[tuple[str, bool, bool], ...], bool] = {}
        self._text_by_token: dict[int, str] = {}

    def render_conversation(
        self, messages: Sequence[Message], schemas: Schemas, config: RolloutConfig
    ) -> RenderedMessages:
        """Of a whole conversation that the client has made. Raises TooMuch and ConfigError."""
        return self._render(messages, schemas, config, 0, lambda said: self.chat.encode_conversation(said, schemas))

    def render_continuation(
        self, found: Node, messages: Sequence[Message], count: int, schemas: Schemas, config: RolloutConfig
    ) -> tuple[Node | None, RenderedMessages]:
        """The answer behind which a context of these messages is to stand, and the context. found: that which goes
        farthest into them, `count` messages. Raises TooMuch and ConfigError.

        Where the template leaves out reasoning of earlier turns, what was said is kept by its ids without those of the
        reasoning, from the first such turn on.
        """
        last = int(found.ids[-1])
        before = len(found.tokens)
        behind = self._render(
            messages[count:], schemas, config, before, lambda said: self.chat.encode_continuation(said, schemas, last)
        )
        path = found.path()
        cut = [
            bool(node.num_reasoning_tokens) and self._is_reasoning_dropped(messages[node.num_messages :])
            for node in path
        ]
        if True not in cut:
            return found, behind
        first = cut.index(True)
        parts = [
            node.ids[node.num_reasoning_tokens :]
            if own
            else self._strip_open_reasoning(node.ids)
            if below
            else node.ids
            for node, own, below in zip(path, cut, [*cut[1:], False], strict=True)
        ]
        parent, kept = path[first - 1].parent, path[first - 1 :]
        known = [message for node in kept for message in node.messages]
        said = [
            own if own["role"] == "tool" else given
            for own, given in zip(known, messages[count - len(known) : count], strict=True)
        ]
        ids = np.concatenate([*parts[first - 1 :], behind.ids])
        return parent, RenderedMessages(ids, (*said, *behind.messages), behind.num_truncated)

    def _render(
        self,
        messages: Sequence[Message],
        schemas: Schemas,
        config: RolloutConfig,
        before: int,
        make: Callable[[Sequence[Message]], list[int]],
    ) -> RenderedMessages:
        """before: tokens that stand there already."""
        room = config.max_context - before - 1
        texts = [text for one in messages if one["role"] != "tool" for text in (one["content"], *_argument_texts(one))]
        self._check_length(texts, room, before)
        found = truncate_observations(
            self.chat, messages, schemas, config.max_observation, room, count_reserved_tokens(config), make
        )
        if found is None:
            raise ContextOverflow(str(before + len(make(messages))))
        said, ids = found
        cut = sum(one["content"] != given["content"] for one, given in zip(said, messages, strict=True))
        return RenderedMessages(as_token_ids(ids), tuple(said), cut)

    def _check_length(self, texts: Sequence[str], room: int, before: int) -> None:
        """Raise TooMuch where this is so much text that it need not be read to its end: that takes seconds of a
        megabyte, in which nobody else is answered. What may fit is not read here."""
        count = 0
        for text in texts if sum(map(len, texts)) > max(_CHUNK_CHARS, _CHARS_PER_TOKEN * room) else ():
            for begin in range(0, len(text), _CHUNK_CHARS):
                count += len(self.chat.encode(text[begin : begin + _CHUNK_CHARS])) - _SPLIT_TOKENS
                if count > room:
                    raise ContextOverflow(f"more than {before + count}")

    def _is_reasoning_dropped(self, behind: Sequence[Message]) -> bool:
        """Whether the template leaves out the reasoning of a turn before these messages."""
        kinds = tuple((one["role"], bool(one["content"]), bool(one.get("tool_calls"))) for one in behind)
        known = self._drop_by_pattern
        if kinds not in known:
            known[kinds] = self.chat.is_reasoning_dropped(behind)
        return known[kinds]

    def _strip_open_reasoning(self, ids: Ids) -> Ids:
        """A context without the mark by which the template opens reasoning at its end."""
        marks = self.chat.reasoning_marks
        for tail in range(1, min(len(ids), _MAX_MARK_TOKENS) + 1) if marks is not None else ():
            text = self.chat.decode(ids[-tail:])
            if marks is not None and marks[0] in text:
                return ids[:-tail] if is_open(text, marks) else ids
        return ids

    async def read_answer(self, said: Generation, asked: CompletionRequest, node: Node) -> Choice:
        """An answer as the client gets it."""
        chat, ids = self.chat, np.asarray(said.token_ids, np.int32)
        last, after = get_last(ids), node.messages[-1]["role"]
        own = ids[:-1] if last in chat.end_token_ids else ids
        whole = chat.decode(own)
        stopped = [whole.find(stop) for stop in asked.stop_strings if stop in whole]
        thoughts, text = chat.split_reasoning(whole[: min(stopped)] if stopped else whole, after)
        reply = ParsedResponse(text)
        if asked.schemas and last is not None and last == chat.end_of_call:
            reply = await self._parse(text, asked.schemas)
        message: Message = {"role": "assistant", "content": reply.text}
        if thoughts:
            message["reasoning_content"] = thoughts
        if reply.calls:
            before = sum(one.num_calls for one in node.path())
            message["tool_calls"] = [_format_call(call, number) for number, call in enumerate(reply.calls, before)]
        cut = said.finish_reason == "length" and last not in chat.end_token_ids and not stopped
        return Choice(
            message,
            "tool_calls" if reply.calls else "length" if cut else "stop",
            said,
            token_texts=tuple(map(self._decode_token, ids.tolist())) if asked.logprobs else None,
            num_reasoning_tokens=self._count_reasoning_tokens(own, after),
            num_parse_errors=int(bool(reply.error)),
        )

    def _decode_token(self, token: int) -> str:
        known = self._text_by_token
        if token not in known:
            known[token] = self.chat.decode([token])
        return known[token]

    def _count_reasoning_tokens(self, ids: Ids, after: str) -> int:
        """Tokens of an answer that are reasoning, and space behind it."""
        chat = self.chat
        span = chat.find_reasoning_range(ids, after) if chat.reasoning_marks is not None else None
        end = 0 if span is None else span.stop
        while 0 < end < len(ids) and not chat.decode(ids[end : end + 1]).strip():
            end += 1
        return end

    def has_drift(self, leaf: Node) -> bool:
        """Whether it would have been asked for with other ids if all before it had been rendered afresh."""
        path = leaf.path()[:-1]
        if len(path) == 1:
            return False  # it was rendered
        messages = [message for node in path for message in node.messages]
        try:
            fresh = self.chat.encode_conversation(messages, path[0].schemas)
        except ConfigError:
            return True
        return not np.array_equal(as_token_ids(fresh), path[-1].tokens)


def _argument_texts(message: Message) -> list[str]:
    return [dump_arguments(call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def _format_call(call: ToolCall, number: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": format_call_id(call.name, number), "type": "function", "function": function}


def get_last(ids: Ids) -> int | None:
    return int(ids[-1]) if len(ids) else None
