"""Spans of text that two tokenizations of it have in common, so that log-probs of one can be compared with the other's.

Log-probs of single tokens of different tokenizers are not comparable, but their sums over the same text are
(arXiv:2402.12030 compares sorted distributions instead). A span is a piece of text between two neighbouring places
at which both tokenizations have a boundary."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence


def token_ends(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int | None]:
    """Return the offset in characters at which each token ends in the text of `ids`; None within a character.

    Each token is decoded after the one before it, because a decoder may drop the blank at the beginning of a text.
    """
    ends: list[int | None] = []
    first = start = offset = 0  # tokens before `start` are in `offset`; `first` is where the context begins
    for stop in range(1, len(ids) + 1):
        text = decode(ids[first:stop])
        if text.endswith("\ufffd"):  # the first bytes of a character
            ends.append(None)
            continue
        offset += len(text) - len(decode(ids[first:start]))
        ends.append(offset)
        first, start = start, stop
    return ends


def align_spans(text: str, student: Sequence[int | None], teacher: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """Return the span of each token of two tokenizations of `text`, from 0; -1 where there is none.

    There is none after the last common boundary, and for bytes that are no text, which decode to a replacement
    character: the other tokenization has that character, not the bytes. student, teacher: `token_ends` of the two.
    """
    common = sorted({end for end in student if end is not None} & {end for end in teacher if end is not None})
    is_text = ["\ufffd" not in text[begin:end] for begin, end in zip([0, *common], common, strict=False)]

    def number(ends: Sequence[int | None]) -> list[int]:
        spans: list[int] = []
        following = -1  # of a part of a character: the span of the token that completes it
        for end in reversed(ends):
            if end is not None:
                span = bisect_left(common, end)
                following = span if span < len(common) and is_text[span] else -1
            spans.append(following)
        return spans[::-1]

    return number(student), number(teacher)
