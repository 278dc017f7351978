"""Where in a turn a policy reasons, and where it says something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
"""What opens reasoning, and what closes it, in the families that there are."""


@dataclass(frozen=True)
class Reasoned:
    """Of a turn's text, what is before `stop`, marks included, and from `inner` to before `end` without them."""

    inner: int
    end: int
    stop: int


def marks_of(tokenizer: Any) -> tuple[str, str] | None:
    """Those of a model: two tokens of its tokenizer, or else words in its template; None where it has none."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    template = str(tokenizer.chat_template)
    for opening, closing in MARKS:
        if {opening, closing} <= added or closing in template:
            return opening, closing
    return None


def find(text: str, marks: tuple[str, str], opened: bool) -> Reasoned | None:
    """The reasoning of a turn, which it begins with: what is between marks further on is quoted. opened: the template
    has opened it. Where it has not, and the turn has only the mark that closes, it has come without one."""
    opening, closing = marks
    inner = len(text) - len(text.lstrip())
    marked = text.startswith(opening, inner)
    inner = inner + len(opening) if marked else 0
    end = text.find(closing, inner)
    if end == -1:
        return Reasoned(inner, len(text), len(text)) if marked or opened else None
    if not marked and not opened and opening in text[:end]:
        return None
    return Reasoned(inner, end, end + len(closing))


def is_open(text: str, marks: tuple[str, str]) -> bool:
    """Whether the head of a turn leaves reasoning open."""
    opening, closing = marks
    return text.rfind(opening) > text.rfind(closing)
