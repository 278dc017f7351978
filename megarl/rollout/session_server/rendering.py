"""Convert messages to ids, and sampled ids to messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.chat_format.chat_messages import dump_arguments, format_call, format_call_id, is_open
from megarl.chat_format.chat_template import ChatTemplate
from megarl.chat_format.observations import count_reserved_tokens, truncate_observations
from megarl.config import ConfigError, RolloutConfig
from megarl.engine.engine_protocol import Generation
from megarl.engine.tool_calls import ParsedResponse, ParseFunction
from megarl.rollout.session_server.requests import CompletionRequest
from megarl.rollout.session_server.responses import Choice, cut_at_stop
from megarl.rollout.session_server.token_tree import Node, Schemas
from megarl.types import Ids, Message, as_token_ids

_MAX_MARK_TOKENS = 16
"""Trailing context tokens that are searched for a mark that opens reasoning."""


_CHUNK_CHARS = 1 << 14
"""Characters of an oversized text that are tokenized at a time."""
_CHARS_PER_TOKEN = 8
"""Upper bound on characters per token in nearly all texts."""
_SPLIT_TOKENS = 16
"""Generous bound on the tokens added by splitting a text in two."""


class ContextOverflow(Exception):
    """The messages leave no room for an answer. Its text is their token count, including the context before them."""


@dataclass(frozen=True)
class RenderedMessages:
    """Messages as the policy reads them.

    Attributes:
        ids: their tokens
        num_truncated: number of truncated tool results
    """

    ids: Ids
    messages: tuple[Message, ...]
    num_truncated: int = 0


class MessageRenderer:
    """Renders messages with a chat template and parses answers."""

    def __init__(self, chat: ChatTemplate, parse: ParseFunction, config: RolloutConfig) -> None:
        self.chat, self._parse, self.config = chat, parse, config

    def render_conversation(self, messages: Sequence[Message], schemas: Schemas) -> RenderedMessages:
        """Render a whole conversation from a client. Raises ContextOverflow and ConfigError."""
        return self._render(messages, schemas, 0, lambda shown: self.chat.encode_conversation(shown, schemas))

    def render_continuation(
        self, answer: Node, messages: Sequence[Message], count: int, schemas: Schemas
    ) -> tuple[Node | None, RenderedMessages]:
        """Render the messages that follow an answer, and return them with the answer they must be attached to.

        If the template drops the reasoning of earlier turns, the history from the first such turn on is replaced by its
        ids without the reasoning. Raises ContextOverflow and ConfigError.

        Args:
            answer: the answer that matches the longest prefix of the messages
            count: length of that prefix
        """
        last_token = int(answer.ids[-1])
        continuation = self._render(
            messages[count:],
            schemas,
            len(answer.tokens),
            lambda shown: self.chat.encode_continuation(shown, schemas, last_token),
        )
        path = answer.path()
        is_dropped = [
            bool(node.num_reasoning_tokens) and self.chat.is_reasoning_dropped(messages[node.num_messages :])
            for node in path
        ]
        if True not in is_dropped:
            return answer, continuation
        first_dropped = is_dropped.index(True)
        ids_per_node = [
            node.ids[node.num_reasoning_tokens :]
            if current
            else self._strip_open_reasoning(node.ids)
            if drops_next
            else node.ids
            for node, current, drops_next in zip(path, is_dropped, [*is_dropped[1:], False], strict=True)
        ]
        parent, replaced_nodes = path[first_dropped - 1].parent, path[first_dropped - 1 :]
        recorded_messages = [message for node in replaced_nodes for message in node.messages]
        history = [
            current if current["role"] == "tool" else sent
            for current, sent in zip(recorded_messages, messages[count - len(recorded_messages) : count], strict=True)
        ]
        ids = np.concatenate([*ids_per_node[first_dropped - 1 :], continuation.ids])
        return parent, RenderedMessages(ids, (*history, *continuation.messages), continuation.num_truncated)

    def _render(
        self,
        messages: Sequence[Message],
        schemas: Schemas,
        before: int,
        encode: Callable[[Sequence[Message]], list[int]],
    ) -> RenderedMessages:
        """Render and truncate the messages; `before` is the number of tokens that precede them."""
        config, room = self.config, self.config.max_context - before - 1
        texts = [
            text
            for message in messages
            if message["role"] != "tool"
            for text in (
                message["content"],
                *(dump_arguments(call["function"]["arguments"]) for call in message.get("tool_calls", ())),
            )
        ]
        self._check_length(texts, room, before)
        truncated = truncate_observations(
            self.chat, messages, schemas, config.max_tool_response_tokens, room, count_reserved_tokens(config), encode
        )
        if truncated is None:
            raise ContextOverflow(str(before + len(encode(messages))))
        shown_messages, ids = truncated
        num_truncated = sum(
            message["content"] != sent["content"] for message, sent in zip(shown_messages, messages, strict=True)
        )
        return RenderedMessages(as_token_ids(ids), tuple(shown_messages), num_truncated)

    def _check_length(self, texts: Sequence[str], max_tokens: int, before: int) -> None:
        """Raise ContextOverflow as soon as the texts certainly exceed the room.

        Tokenizing a megabyte takes seconds, during which no other request is answered. Texts that may fit are not
        tokenized here.
        """
        count = 0
        for text in texts if sum(map(len, texts)) > max(_CHUNK_CHARS, _CHARS_PER_TOKEN * max_tokens) else ():
            for begin in range(0, len(text), _CHUNK_CHARS):
                count += len(self.chat.encode(text[begin : begin + _CHUNK_CHARS])) - _SPLIT_TOKENS
                if count > max_tokens:
                    raise ContextOverflow(f"more than {before + count}")

    def _strip_open_reasoning(self, ids: Ids) -> Ids:
        """Remove the mark by which the template opens reasoning at the end of a context."""
        marks = self.chat.reasoning_marks
        for tail in range(1, min(len(ids), _MAX_MARK_TOKENS) + 1) if marks is not None else ():
            text = self.chat.decode(ids[-tail:])
            if marks is not None and marks[0] in text:
                return ids[:-tail] if is_open(text, marks) else ids
        return ids

    async def read_answer(self, generation: Generation, request: CompletionRequest, node: Node) -> Choice:
        """Parse a generation into the choice that the client gets."""
        chat, ids = self.chat, np.asarray(generation.token_ids, np.int32)
        last_token, previous_role = get_last(ids), node.messages[-1]["role"]
        content_ids = ids[:-1] if last_token in chat.end_token_ids else ids
        text, is_stopped = cut_at_stop(chat.decode(content_ids), request.stop_strings)
        reasoning, text = chat.split_reasoning(text, previous_role)
        reply = ParsedResponse(text)
        if request.schemas and last_token is not None and last_token == chat.end_of_call:
            reply = await self._parse(text, request.schemas)
        message: Message = {"role": "assistant", "content": reply.text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if reply.calls:
            num_previous_calls = sum(ancestor.num_calls for ancestor in node.path())
            message["tool_calls"] = [
                format_call(call.name, call.arguments, format_call_id(call.name, number))
                for number, call in enumerate(reply.calls, num_previous_calls)
            ]
        is_truncated = generation.finish_reason == "length" and last_token not in chat.end_token_ids and not is_stopped
        return Choice(
            message,
            "tool_calls" if reply.calls else "length" if is_truncated else "stop",
            generation,
            token_texts=tuple(chat.decode([token]) for token in ids.tolist()) if request.logprobs else None,
            num_reasoning_tokens=self._count_reasoning_tokens(content_ids, previous_role),
            num_parse_errors=int(bool(reply.error)),
        )

    def _count_reasoning_tokens(self, ids: Ids, after: str) -> int:
        """Count an answer's leading reasoning tokens, including the whitespace after them."""
        chat = self.chat
        span = chat.find_reasoning_range(ids, after) if chat.reasoning_marks is not None else None
        end = 0 if span is None else span.stop
        while 0 < end < len(ids) and not chat.decode(ids[end : end + 1]).strip():
            end += 1
        return end

    def has_drift(self, leaf: Node) -> bool:
        """Return whether rendering the history before this answer afresh would give other ids."""
        path = leaf.path()[:-1]
        if len(path) == 1:
            return False  # the whole context was rendered at once
        messages = [message for node in path for message in node.messages]
        try:
            fresh = self.chat.encode_conversation(messages, path[0].schemas)
        except ConfigError:
            return True
        return not np.array_equal(as_token_ids(fresh), path[-1].tokens)


def get_last(ids: Ids) -> int | None:
    return int(ids[-1]) if len(ids) else None
