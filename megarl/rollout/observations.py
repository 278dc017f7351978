"""What the policy gets to see of what its tools say: all of it, or its beginning and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.data.text import encodable
from megarl.rollout.chat import Chat
from megarl.types import Message


def observed(
    chat: Chat, results: Sequence[Message], schemas: Sequence[dict[str, Any]], each: int, room: int, spare: int
) -> tuple[list[Message], list[int]] | None:
    """(messages, ids): the results as the policy reads them, and `Chat.continuation` of them.

    results: messages of role `tool`. each: tokens that one of them may have; what is longer loses its middle. room:
    tokens that all of it may have, with what the template puts around; where it would be more, the longest results are
    cut to the same length. spare: so many of these are left where that is possible. None where not even a mark in place
    of each result fits.
    """
    texts = [_Text(chat, encodable(str(message["content"]))) for message in results]
    for most, room_now in ((each, room - spare), (0, room)):
        while True:
            said = [{**message, "content": text.cut(most)} for message, text in zip(results, texts, strict=True)]
            ids = chat.continuation(said, schemas)
            over = len(ids) - room_now
            if over <= 0:
                return said, ids
            if most == 0:
                break
            most = _lowered(most, [len(text.ids) for text in texts], over)
    return None


def _lowered(most: int, lengths: Sequence[int], over: int) -> int:
    """The largest length, below `most`, by which all texts together lose at least `over` tokens; 0 if there is none."""
    goal = sum(min(length, most) for length in lengths) - over
    low, high = 0, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(length, middle) for length in lengths) <= goal:
            low = middle
        else:
            high = middle - 1
    return low


class _Text:
    """What a tool says, without control tokens, and its ids."""

    def __init__(self, chat: Chat, text: str) -> None:
        self._chat, self._text = chat, text
        self._safe = chat.controls.escape(text)
        self.ids = chat.ids(self._safe)

    def cut(self, most: int) -> str:
        """The text with at most so many tokens: a mark in place of its middle says how many are left out. It is all of
        the text where the mark would be longer."""
        chat, ids = self._chat, self.ids
        mark = _mark(len(ids))
        if len(ids) <= max(most, len(chat.ids(mark))):
            return self._text
        kept = most - len(chat.ids(mark))
        while kept > 0:
            head, tail = (kept + 1) // 2, kept // 2  # where a character is split over tokens, half of it is left out
            begin, end = chat.text(ids[:head]).rstrip("\ufffd"), chat.text(ids[len(ids) - tail :]).lstrip("\ufffd")
            shown = begin + _mark(len(ids) - kept) + end
            over = len(chat.ids(shown)) - most  # tokens may be others beside a mark
            if over <= 0:
                return shown
            kept -= over
        return mark.strip()


def _mark(count: int) -> str:
    return f"\n... ({count} tokens cut) ...\n"
