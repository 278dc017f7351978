"""Messages to ids, and ids to messages: what is behind a turn of the policy, and what its turn says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.chat_format.chat_messages import call_id
from megarl.chat_format.chat_template import Chat
from megarl.chat_format.observations import observed, spare_of
from megarl.chat_format.reasoning import is_open
from megarl.config import ConfigError, RolloutConfig
from megarl.engine.generation import Generation
from megarl.engine.tool_calls import Call, Parse, Reply
from megarl.rollout.session_server.requests import Asked
from megarl.rollout.session_server.responses import Choice, as_text
from megarl.rollout.session_server.token_tree import Node, Schemas
from megarl.types import Ids, Message, ids_of

_MARK = 16
"""Tokens within which the head of a turn opens reasoning."""


_PIECE = 1 << 14
"""Characters of a flood that are read at a time."""
_USUAL = 8
"""Characters of a token, or fewer, in nearly all texts."""
_TORN = 16
"""Tokens that tearing a text in two may add, with room to spare."""


class TooMuch(Exception):
    """Messages leave the policy no room. tokens: that they are, in words, with what stands before them."""

    def __init__(self, tokens: str) -> None:
        super().__init__(tokens)
        self.tokens = tokens


@dataclass(frozen=True)
class Shown:
    """Messages as the policy reads them. ids: that they became. cut: results among them that are cut."""

    ids: Ids
    messages: tuple[Message, ...]
    cut: int = 0


class Rendering:
    """By a chat, and a parser of what it calls. What it finds out of the template it keeps."""

    def __init__(self, chat: Chat, parse: Parse) -> None:
        self.chat, self._parse = chat, parse
        self._dropped: dict[tuple[tuple[str, bool, bool], ...], bool] = {}
        self._spelled: dict[int, str] = {}

    def begin(self, messages: Sequence[Message], schemas: Schemas, config: RolloutConfig) -> Shown:
        """Of a whole conversation that the client has made. Raises TooMuch and ConfigError."""
        return self._shown(messages, schemas, config, 0, lambda said: self.chat.opening(said, schemas))

    def go_on(
        self, found: Node, messages: Sequence[Message], count: int, schemas: Schemas, config: RolloutConfig
    ) -> tuple[Node | None, Shown]:
        """The answer behind which a context of these messages is to stand, and the context. found: that which goes
        farthest into them, `count` messages. Raises TooMuch and ConfigError.

        Where the template leaves out reasoning of earlier turns, what was said is kept by its ids without those of the
        reasoning, from the first such turn on.
        """
        last = int(found.ids[-1])
        before = len(found.tokens)
        behind = self._shown(
            messages[count:], schemas, config, before, lambda said: self.chat.continuation(said, schemas, last)
        )
        path = found.path()
        cut = [bool(node.thought) and self._drops(messages[node.count :]) for node in path]
        if True not in cut:
            return found, behind
        first = cut.index(True)
        parts = [
            node.ids[node.thought :] if own else self._shut(node.ids) if below else node.ids
            for node, own, below in zip(path, cut, [*cut[1:], False], strict=True)
        ]
        parent, kept = path[first - 1].parent, path[first - 1 :]
        known = [message for node in kept for message in node.messages]
        said = [
            own if own["role"] == "tool" else given
            for own, given in zip(known, messages[count - len(known) : count], strict=True)
        ]
        ids = np.concatenate([*parts[first - 1 :], behind.ids])
        return parent, Shown(ids, (*said, *behind.messages), behind.cut)

    def _shown(
        self,
        messages: Sequence[Message],
        schemas: Schemas,
        config: RolloutConfig,
        before: int,
        make: Callable[[Sequence[Message]], list[int]],
    ) -> Shown:
        """before: tokens that stand there already."""
        room = config.max_context - before - 1
        texts = [text for one in messages if one["role"] != "tool" for text in (one["content"], *_arguments(one))]
        self._check_flood(texts, room, before)
        found = observed(self.chat, messages, schemas, config.max_observation, room, spare_of(config), make)
        if found is None:
            raise TooMuch(str(before + len(make(messages))))
        said, ids = found
        cut = sum(one["content"] != given["content"] for one, given in zip(said, messages, strict=True))
        return Shown(ids_of(ids), tuple(said), cut)

    def _check_flood(self, texts: Sequence[str], room: int, before: int) -> None:
        """Raise TooMuch where this is so much text that it need not be read to its end: that takes seconds of a
        megabyte, in which nobody else is answered. What may fit is not read here."""
        count = 0
        for text in texts if sum(map(len, texts)) > max(_PIECE, _USUAL * room) else ():
            for begin in range(0, len(text), _PIECE):
                count += len(self.chat.ids(text[begin : begin + _PIECE])) - _TORN
                if count > room:
                    raise TooMuch(f"more than {before + count}")

    def _drops(self, behind: Sequence[Message]) -> bool:
        """Whether the template leaves out the reasoning of a turn before these messages."""
        kinds = tuple((one["role"], bool(one["content"]), bool(one.get("tool_calls"))) for one in behind)
        known = self._dropped
        if kinds not in known:
            known[kinds] = self.chat.drops_reasoning(behind)
        return known[kinds]

    def _shut(self, ids: Ids) -> Ids:
        """A context without the mark by which the template opens reasoning at its end."""
        marks = self.chat.marks
        for tail in range(1, min(len(ids), _MARK) + 1) if marks is not None else ():
            text = self.chat.text(ids[-tail:])
            if marks is not None and marks[0] in text:
                return ids[:-tail] if is_open(text, marks) else ids
        return ids

    async def read(self, said: Generation, asked: Asked, node: Node) -> Choice:
        """An answer as the client gets it."""
        chat, ids = self.chat, np.asarray(said.token_ids, np.int32)
        last, after = last_of(ids), node.messages[-1]["role"]
        own = ids[:-1] if last in chat.ends else ids
        whole = chat.text(own)
        stopped = [whole.find(stop) for stop in asked.stops if stop in whole]
        thoughts, text = chat.reasoned(whole[: min(stopped)] if stopped else whole, after)
        reply = Reply(text)
        if asked.schemas and last is not None and last == chat.end_of_call:
            reply = await self._parse(text, asked.schemas)
        message: Message = {"role": "assistant", "content": reply.text}
        if thoughts:
            message["reasoning_content"] = thoughts
        if reply.calls:
            before = sum(one.calls for one in node.path())
            message["tool_calls"] = [_call(call, number) for number, call in enumerate(reply.calls, before)]
        cut = said.finish == "length" and last not in chat.ends and not stopped
        return Choice(
            message,
            "tool_calls" if reply.calls else "length" if cut else "stop",
            said,
            spelled=tuple(map(self._spell, ids.tolist())) if asked.logprobs else None,
            thought=self._thought(own, after),
            errors=int(bool(reply.error)),
        )

    def _spell(self, token: int) -> str:
        known = self._spelled
        if token not in known:
            known[token] = self.chat.text([token])
        return known[token]

    def _thought(self, ids: Ids, after: str) -> int:
        """Tokens of an answer that are reasoning, and space behind it."""
        chat = self.chat
        span = chat.reasoning(ids, after) if chat.marks is not None else None
        end = 0 if span is None else span.stop
        while 0 < end < len(ids) and not chat.text(ids[end : end + 1]).strip():
            end += 1
        return end

    def drifts(self, leaf: Node) -> bool:
        """Whether it would have been asked for with other ids if all before it had been rendered afresh."""
        path = leaf.path()[:-1]
        if len(path) == 1:
            return False  # it was rendered
        messages = [message for node in path for message in node.messages]
        try:
            fresh = self.chat.opening(messages, path[0].schemas)
        except ConfigError:
            return True
        return not np.array_equal(ids_of(fresh), path[-1].tokens)


def _arguments(message: Message) -> list[str]:
    return [as_text(call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def _call(call: Call, number: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(call.name, number), "type": "function", "function": function}


def last_of(ids: Ids) -> int | None:
    return int(ids[-1]) if len(ids) else None
