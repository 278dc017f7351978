"""Spans of text that two tokenizations have in common: by hand, and their properties on random cuts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from megarl.algorithms.token_spans import align_spans, token_ends

pytestmark = pytest.mark.alone

EURO = chr(0x20AC).encode()


def make_decoder(pieces: Sequence[bytes]) -> Callable[[Sequence[int]], str]:
    """Return a decoder of ids that are indices of `pieces`."""
    return lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")


def test_ends_of_tokens_by_hand() -> None:
    """The euro sign has three bytes, in two tokens; its first one ends within a character."""
    pieces = [b"a", b" bc", EURO[:2], EURO[2:], b"", b"d"]
    assert token_ends(range(6), make_decoder(pieces)) == [1, 4, None, 5, 5, 6]
    assert token_ends([], make_decoder(pieces)) == []
    assert token_ends([0, 2], make_decoder(pieces)) == [1, None]


def test_ends_behind_a_decoder_that_drops_the_first_blank() -> None:
    words = [" It", " is", "n't"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids).removeprefix(" ")

    assert token_ends([0, 1, 2], decode) == [2, 5, 8] and decode([0, 1, 2]) == "It isn't"


def test_spans_by_hand() -> None:
    """`unhappy day` as un|happy| day and as unh|appy| d|ay: two spans, of 2 and 2 and of 1 and 2 tokens."""
    text = "unhappy day"
    assert align_spans(text, [2, 7, 11], [3, 7, 9, 11]) == ([0, 0, 1], [0, 0, 1, 1])
    assert align_spans(text, [2, 7, 11], [2, 7, 11]) == ([0, 1, 2], [0, 1, 2])
    # A token of a part of a character belongs to the span of the token that completes it; one without text to the
    # span before it.
    assert align_spans("abc", [1, None, 2, 2, 3], [1, 2, 3]) == ([0, 1, 1, 1, 2], [0, 1, 2])
    assert align_spans("a", [1, None], [1]) == ([0, -1], [0])  # the last character is incomplete
    assert align_spans("", [], []) == ([], [])


def test_bytes_that_are_no_text_have_no_span() -> None:
    """The first byte of the euro sign alone decodes to the replacement character, which the teacher has instead."""
    ends = token_ends(range(3), make_decoder([b"a", EURO[:1], b"b"]))
    text = f"a{chr(0xFFFD)}b"
    assert ends == [1, None, 3] and align_spans(text, ends, [1, 2, 3]) == ([0, -1, -1], [0, -1, -1])
    assert align_spans(text + "c", [*ends, 4], [1, 2, 3, 4]) == ([0, -1, -1, 2], [0, -1, -1, 2])


@pytest.mark.parametrize("seed", range(20))
def test_spans_have_the_same_text_in_both_tokenizations(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("abc ") for _ in range(40))

    def cut(count: int) -> list[str]:
        places = sorted({0, len(text), *draw.sample(range(1, len(text)), count)})
        return [text[a:b] for a, b in zip(places, places[1:], strict=False)]

    sides = cut(12), cut(20)
    ends = [token_ends(range(len(side)), make_decoder([piece.encode() for piece in side])) for side in sides]
    spans = align_spans(text, *ends)
    for number in range(max(spans[0]) + 1):
        first, second = (
            "".join(token for token, span in zip(side, side_spans, strict=True) if span == number)
            for side, side_spans in zip(sides, spans, strict=True)
        )
        assert first == second != ""
    assert max(spans[0]) == max(spans[1]) and -1 not in spans[0] + spans[1]
    assert max(spans[0]) + 1 == len({*ends[0]} & {*ends[1]})  # the finest spans there are
