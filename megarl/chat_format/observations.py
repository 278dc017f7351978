"""Truncate tool results to what the policy may read: all of it, or its head and tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import RolloutConfig
from megarl.types import Message
from megarl.utils.text import replace_surrogates

_CHARS_PER_TOKEN = 16
"""Characters read from the head and from the tail for each token that may be shown; most tokens have fewer."""
_MAX_TOKENS_PER_BYTE = 2
"""Generous bound on tokens per byte of text: a text below it need not be tokenized."""
_RESERVED_SHARE = 16
"""Results leave 1/16 of `max_context` to the policy, or `max_new_tokens` if that is less."""
_SEARCH_STEPS = 64
"""Resolution of the search for the truncated length, as a fraction of `max_tokens_per_result`."""


def count_reserved_tokens(config: RolloutConfig) -> int:
    """Return how many tokens results leave to the policy if possible."""
    return min(config.max_new_tokens, config.max_context // _RESERVED_SHARE)


def truncate_observations(
    chat: ChatTemplate,
    messages: Sequence[Message],
    schemas: Sequence[dict[str, Any]],
    max_tokens_per_result: int,
    max_tokens: int,
    num_reserved: int,
    encode: Callable[[Sequence[Message]], list[int]] | None = None,
) -> tuple[list[Message], list[int]] | None:
    """Truncate tool results to fit the context, and encode the messages that follow the policy's turn.

    Args:
        messages: tool results, and messages of other roles, which are not truncated
        max_tokens_per_result: maximum tokens per result; a longer one loses its middle
        max_tokens: maximum tokens overall, including what the template adds. If exceeded, the longest results are
            truncated to the same length.
        num_reserved: tokens of `max_tokens` to leave free if possible
        encode: encodes the messages, `ChatTemplate.encode_continuation` by default

    Returns:
        the messages as the policy reads them and their ids; None if not even a mark in place of each result fits
    """
    outputs = {
        number: _ToolOutput(chat, replace_surrogates(str(message["content"])), max_tokens_per_result)
        for number, message in enumerate(messages)
        if message["role"] == "tool"
    }
    encode_messages = encode or (lambda messages: chat.encode_continuation(messages, schemas))

    def truncate_to(limit: int) -> tuple[list[Message], list[int]]:
        truncated = list(messages)
        for number, output in outputs.items():
            truncated[number] = {**messages[number], "content": output.truncate(limit)}
        return truncated, encode_messages(truncated)

    def fits(encoded: tuple[list[Message], list[int]], num_free: int) -> bool:
        return len(encoded[1]) <= max_tokens - num_free

    longest = truncate_to(max_tokens_per_result)
    if fits(longest, num_reserved) or not outputs:
        return longest if fits(longest, 0) else None
    best_fit = truncate_to(0)
    if not fits(best_fit, num_reserved):
        return best_fit if fits(best_fit, 0) else None
    low, high = 0, max_tokens_per_result
    # Measure the rendered length: a template that shows results as JSON adds tokens.
    while high - low > max(1, max_tokens_per_result // _SEARCH_STEPS):
        middle = (low + high) // 2
        truncated = truncate_to(middle)
        low, high, best_fit = (middle, high, truncated) if fits(truncated, num_reserved) else (low, middle, best_fit)
    return best_fit


class _ToolOutput:
    """One tool result, tokenized lazily. Of a very long text only head and tail are, and the length is an estimate.

    `max_tokens` is the maximum number of tokens ever shown.
    """

    def __init__(self, chat: ChatTemplate, text: str, max_tokens: int) -> None:
        self._chat, self._text, self._max_tokens = chat, text, max_tokens

    @cached_property
    def _encoded_ends(self) -> tuple[list[int], list[int], int, str]:
        """Tokens of the head and of the tail, the total length, and "about " if that is an estimate."""
        chat, text = self._chat, self._text
        window = _CHARS_PER_TOKEN * self._max_tokens
        num_skipped = len(text) - 2 * window
        if num_skipped <= 0:
            tokens = chat.encode(chat.control_tokens.escape(text))
            return tokens, tokens, len(tokens), ""
        head, tail = (chat.encode(chat.control_tokens.escape(part)) for part in (text[:window], text[-window:]))
        num_read = len(head) + len(tail)
        return head, tail, num_read + num_skipped * num_read // (2 * window), "about "

    def truncate(self, max_tokens: int) -> str:
        """Return the text in at most `max_tokens` tokens, with a mark that counts those left out of its middle, or the
        whole text if the mark would be longer."""
        if _MAX_TOKENS_PER_BYTE * len(self._text.encode()) < max_tokens:
            return self._text
        chat = self._chat
        head_tokens, tail_tokens, length, _ = self._encoded_ends
        mark = self._format_mark(length)
        if length <= max(max_tokens, len(chat.encode(mark))):
            return self._text
        num_kept = max_tokens - len(chat.encode(mark))
        while num_kept > 0:
            head = head_tokens[: (num_kept + 1) // 2]
            tail = tail_tokens[max(0, len(tail_tokens) - num_kept // 2) :]
            omission_mark = self._format_mark(length - len(head) - len(tail))
            # Drop characters whose tokens are split.
            shown = chat.decode(head).rstrip("\ufffd") + omission_mark + chat.decode(tail).lstrip("\ufffd")
            excess = len(chat.encode(shown)) - max_tokens  # tokenization may change next to the mark
            if excess <= 0:
                return shown
            num_kept -= excess
        return mark.strip()

    def _format_mark(self, count: int) -> str:
        return f"\n... ({self._encoded_ends[3]}{count} tokens cut) ...\n"
