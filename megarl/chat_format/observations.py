"""What the policy gets to see of what its tools say: all of it, or its beginning and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import RolloutConfig
from megarl.types import Message
from megarl.utils.text import replace_surrogates

_CHARS_PER_TOKEN = 16
"""Of the beginning and of the end of a text are read for each token that may be shown: most tokens have fewer."""
_MAX_TOKENS_PER_BYTE = 2
"""Tokens that a byte of a text can be, with room to spare: no text that has fewer needs to be counted."""
_RESERVED_SHARE = 16
"""Of `max_context`: results are cut so that such a part of it is left to the policy, or `max_new_tokens` if less."""
_SEARCH_STEPS = 64
"""The length to which results are cut is found but for such a part of `each`."""


def count_reserved_tokens(config: RolloutConfig) -> int:
    """Tokens that results leave to the policy where that is possible."""
    return min(config.max_new_tokens, config.max_context // _RESERVED_SHARE)


def truncate_observations(
    chat: ChatTemplate,
    messages: Sequence[Message],
    schemas: Sequence[dict[str, Any]],
    each: int,
    room: int,
    spare: int,
    make: Callable[[Sequence[Message]], list[int]] | None = None,
) -> tuple[list[Message], list[int]] | None:
    """(messages, ids): the results among the messages as the policy reads them, and `ChatTemplate.encode_continuation` of it all.

    messages: of role `tool`, and of others, which stay as they are. each: tokens that a result may have; what is longer
    loses its middle. room: tokens that all of it may have, with what the template puts around; where it would be more,
    the longest results are cut to the same length. spare: so many of these are left where that is possible. make: the
    ids, where they are others than those of `ChatTemplate.encode_continuation`. None where not even a mark in place of each result
    fits.
    """
    texts = [
        _ToolOutput(chat, replace_surrogates(str(message["content"])), each) if message["role"] == "tool" else None
        for message in messages
    ]
    ids_of = make or (lambda said: chat.encode_continuation(said, schemas))

    def cut(most: int) -> tuple[list[Message], list[int]]:
        said = [
            message if text is None else {**message, "content": text.truncate(most)}
            for message, text in zip(messages, texts, strict=True)
        ]
        return said, ids_of(said)

    def fits(found: tuple[list[Message], list[int]], left: int) -> bool:
        return len(found[1]) <= room - left

    whole = cut(each)
    if fits(whole, spare) or all(text is None for text in texts):
        return whole if fits(whole, 0) else None
    best = cut(0)
    if not fits(best, spare):
        return best if fits(best, 0) else None
    low, high = 0, each  # by what the template makes of it: one that shows results as JSON writes more than they are
    while high - low > max(1, each // _SEARCH_STEPS):
        middle = (low + high) // 2
        found = cut(middle)
        low, high, best = (middle, high, found) if fits(found, spare) else (low, middle, best)
    return best


class _ToolOutput:
    """What a tool says. Of a flood the length is an estimate, for only its beginning and its end are read; of what is
    short, nothing is read. most: tokens that will ever be shown of it."""

    def __init__(self, chat: ChatTemplate, text: str, most: int) -> None:
        self._chat, self._text, self._max_tokens = chat, text, most

    @cached_property
    def _encoded_ends(self) -> tuple[list[int], list[int], int, str]:
        """(tokens of its beginning, of its end, of all, "about " where that is an estimate)"""
        chat, text = self._chat, self._text
        window = _CHARS_PER_TOKEN * self._max_tokens
        beyond = len(text) - 2 * window
        if beyond <= 0:
            whole = chat.encode(chat.control_tokens.escape(text))
            return whole, whole, len(whole), ""
        begin, end = (chat.encode(chat.control_tokens.escape(part)) for part in (text[:window], text[-window:]))
        read = len(begin) + len(end)
        return begin, end, read + beyond * read // (2 * window), "about "

    def truncate(self, most: int) -> str:
        """The text with at most so many tokens: a mark in place of its middle says how many are left out. It is all of
        the text where the mark would be longer."""
        if _MAX_TOKENS_PER_BYTE * len(self._text.encode()) < most:
            return self._text
        chat = self._chat
        begin, end, length, _ = self._encoded_ends
        mark = self._format_mark(length)
        if length <= max(most, len(chat.encode(mark))):
            return self._text
        kept = most - len(chat.encode(mark))
        while kept > 0:
            head, tail = begin[: (kept + 1) // 2], end[len(end) - min(kept // 2, len(end)) :]
            left_out = self._format_mark(length - len(head) - len(tail))
            # Where a character is split over tokens, half of it is left out.
            shown = chat.decode(head).rstrip("\ufffd") + left_out + chat.decode(tail).lstrip("\ufffd")
            over = len(chat.encode(shown)) - most  # tokens may be others beside a mark
            if over <= 0:
                return shown
            kept -= over
        return mark.strip()

    def _format_mark(self, count: int) -> str:
        return f"\n... ({self._encoded_ends[3]}{count} tokens cut) ...\n"
