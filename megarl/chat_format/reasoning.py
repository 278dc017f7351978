"""Split a policy turn into reasoning and content."""

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
"""Opening and closing marks of reasoning in the supported model families."""


@dataclass(frozen=True)
class ReasoningSpan:
    """Reasoning at the start of a turn's text.

    It ends before `stop`, including its marks, and spans `inner_start` to `inner_end` (exclusive) without them.
    """

    inner_start: int
    inner_end: int
    stop: int


def find_marks(tokenizer: Any) -> tuple[str, str] | None:
    """Find a model's marks, as two added tokens or as words in its template; None if it does not reason."""
    added_tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    template = str(tokenizer.chat_template)
    for opening, closing in MARKS:
        if {opening, closing} <= added_tokens or closing in template:
            return opening, closing
    return None


def find_reasoning(text: str, marks: tuple[str, str], opened: bool) -> ReasoningSpan | None:
    """Find the reasoning at the start of a turn; marks further on are quotes.

    `opened` says whether the template opened the reasoning. If it did not and the turn has only a closing mark, the
    reasoning started without a mark.
    """
    opening, closing = marks
    inner_start = len(text) - len(text.lstrip())
    has_mark = text.startswith(opening, inner_start)
    inner_start = inner_start + len(opening) if has_mark else 0
    inner_end = text.find(closing, inner_start)
    if inner_end == -1:
        return ReasoningSpan(inner_start, len(text), len(text)) if has_mark or opened else None
    if not has_mark and not opened and opening in text[:inner_end]:
        return None
    return ReasoningSpan(inner_start, inner_end, inner_end + len(closing))


def is_open(text: str, marks: tuple[str, str]) -> bool:
    """Return whether a turn's text so far leaves reasoning open."""
    opening, closing = marks
    return text.rfind(opening) > text.rfind(closing)


_REASONING_TEXT = "REASONINGWORDS"


def is_reasoning_dropped(
    render: Callable[[Message, Sequence[Message]], str],
    marks: tuple[str, str],
    behind: Sequence[Message],
    result: Message,
) -> bool:
    """Return whether a template drops the reasoning of an assistant turn if the messages `behind` follow.

    The test uses OpenAI's reasoning field if the template knows it, else reasoning inside the content. Raises
    ConfigError if `render` does.

    Args:
        render: renders a turn and the messages that follow it
        result: any tool result
    """
    opening, closing = marks
    by_field = {"role": "assistant", "content": "x", "reasoning_content": _REASONING_TEXT}
    in_text = {"role": "assistant", "content": f"{opening}\n{_REASONING_TEXT}\n{closing}\n\nx"}

    def reads_field() -> bool:
        for following in ([], [result]):
            try:
                if _REASONING_TEXT in render(by_field, following):
                    return True
            except ConfigError:
                pass
        return False

    return _REASONING_TEXT not in render(by_field if reads_field() else in_text, behind)
