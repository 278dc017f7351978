"""Where in a turn a policy reasons, and where it says something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config import ConfigError
from megarl.types import Message

MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
"""What opens reasoning, and what closes it, in the families that there are."""


@dataclass(frozen=True)
class ReasoningSpan:
    """Of a turn's text, what is before `stop`, marks included, and from `inner` to before `end` without them."""

    inner_start: int
    inner_end: int
    stop: int


def find_marks(tokenizer: Any) -> tuple[str, str] | None:
    """Those of a model: two tokens of its tokenizer, or else words in its template; None where it has none."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    template = str(tokenizer.chat_template)
    for opening, closing in MARKS:
        if {opening, closing} <= added or closing in template:
            return opening, closing
    return None


def find_reasoning(text: str, marks: tuple[str, str], opened: bool) -> ReasoningSpan | None:
    """The reasoning of a turn, which it begins with: what is between marks further on is quoted. opened: the template
    has opened it. Where it has not, and the turn has only the mark that closes, it has come without one."""
    opening, closing = marks
    inner = len(text) - len(text.lstrip())
    marked = text.startswith(opening, inner)
    inner = inner + len(opening) if marked else 0
    end = text.find(closing, inner)
    if end == -1:
        return ReasoningSpan(inner, len(text), len(text)) if marked or opened else None
    if not marked and not opened and opening in text[:end]:
        return None
    return ReasoningSpan(inner, end, end + len(closing))


def is_open(text: str, marks: tuple[str, str]) -> bool:
    """Whether the head of a turn leaves reasoning open."""
    opening, closing = marks
    return text.rfind(opening) > text.rfind(closing)


_REASONING_TEXT = "REASONINGWORDS"


def is_reasoning_dropped(
    render: Callable[[Message, Sequence[Message]], str],
    marks: tuple[str, str],
    behind: Sequence[Message],
    result: Message,
) -> bool:
    """Whether a template leaves out the reasoning of an assistant's turn where these messages follow it. Where it knows
    OpenAI's field for reasoning the rule is for that, else for what is in the text.

    render: a turn and what follows it, as text. result: some tool's. Raises ConfigError where `render` does.
    """
    opening, closing = marks
    by_field = {"role": "assistant", "content": "x", "reasoning_content": _REASONING_TEXT}
    in_text = {"role": "assistant", "content": f"{opening}\n{_REASONING_TEXT}\n{closing}\n\nx"}

    def knows_field() -> bool:
        for following in ([], [result]):
            try:
                if _REASONING_TEXT in render(by_field, following):
                    return True
            except ConfigError:
                pass
        return False

    return _REASONING_TEXT not in render(by_field if knows_field() else in_text, behind)
