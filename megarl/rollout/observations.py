"""What the policy gets to see of what its tools say: all of it, or its beginning and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.data.text import encodable
from megarl.rollout.chat import Chat
from megarl.types import Message

_CHARACTERS = 16
"""Of the beginning and of the end of a text are read for each token that may be shown: most tokens have fewer."""
_STEPS = 64
"""The length to which results are cut is found but for such a part of `each`."""


def observed(
    chat: Chat, results: Sequence[Message], schemas: Sequence[dict[str, Any]], each: int, room: int, spare: int
) -> tuple[list[Message], list[int]] | None:
    """(messages, ids): the results as the policy reads them, and `Chat.continuation` of them.

    results: messages of role `tool`. each: tokens that one of them may have; what is longer loses its middle. room:
    tokens that all of it may have, with what the template puts around; where it would be more, the longest results are
    cut to the same length. spare: so many of these are left where that is possible. None where not even a mark in place
    of each result fits.
    """
    texts = [_Text(chat, encodable(str(message["content"])), each) for message in results]

    def cut(most: int) -> tuple[list[Message], list[int]]:
        said = [{**message, "content": text.cut(most)} for message, text in zip(results, texts, strict=True)]
        return said, chat.continuation(said, schemas)

    def fits(found: tuple[list[Message], list[int]], left: int) -> bool:
        return len(found[1]) <= room - left

    whole = cut(each)
    if fits(whole, spare):
        return whole
    best = cut(0)
    if not fits(best, spare):
        return best if fits(best, 0) else None
    low, high = 0, each  # by what the template makes of it: one that shows results as JSON writes more than they are
    while high - low > max(1, each // _STEPS):
        middle = (low + high) // 2
        found = cut(middle)
        low, high, best = (middle, high, found) if fits(found, spare) else (low, middle, best)
    return best


class _Text:
    """What a tool says. length: in tokens; of a flood it is an estimate, for only its beginning and its end are read.

    most: tokens that will ever be shown of it.
    """

    def __init__(self, chat: Chat, text: str, most: int) -> None:
        self._chat, self._text = chat, text
        window = _CHARACTERS * most
        self._about, beyond = "", len(text) - 2 * window
        if beyond <= 0:
            self._begin = self._end = chat.ids(chat.controls.escape(text))
            self.length = len(self._begin)
            return
        self._begin, self._end = (chat.ids(chat.controls.escape(part)) for part in (text[:window], text[-window:]))
        read = len(self._begin) + len(self._end)
        self._about, self.length = "about ", read + beyond * read // (2 * window)

    def cut(self, most: int) -> str:
        """The text with at most so many tokens: a mark in place of its middle says how many are left out. It is all of
        the text where the mark would be longer."""
        chat = self._chat
        mark = self._mark(self.length)
        if self.length <= max(most, len(chat.ids(mark))):
            return self._text
        kept = most - len(chat.ids(mark))
        while kept > 0:
            head, tail = self._begin[: (kept + 1) // 2], self._end[len(self._end) - min(kept // 2, len(self._end)) :]
            left_out = self._mark(self.length - len(head) - len(tail))
            # Where a character is split over tokens, half of it is left out.
            shown = chat.text(head).rstrip("\ufffd") + left_out + chat.text(tail).lstrip("\ufffd")
            over = len(chat.ids(shown)) - most  # tokens may be others beside a mark
            if over <= 0:
                return shown
            kept -= over
        return mark.strip()

    def _mark(self, count: int) -> str:
        return f"\n... ({self._about}{count} tokens cut) ...\n"
