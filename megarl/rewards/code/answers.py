"""The code in what a policy has said."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from megarl.rewards.stated import stated

LONGEST = 200_000
"""Characters of code."""
_FENCE = "```"
_TAG = re.compile(r"[ \t]*([\w+#.-]{0,20})[ \t]*(?:\{[^}\n]{0,80}\})?[ \t]*\r?", re.ASCII)
_LONGEST_TAG = 120
_END = re.compile(r"^[ \t]{0,12}```", re.MULTILINE)
_PYTHON = ("python", "py", "python3")


def code_of(answer: str) -> str:
    """The last fenced block that is marked as Python, else the last that is not marked, else the last; where there is
    none, what is between `<answer>` tags, else all of the answer. A block without an end goes to the end. What stands
    before `</think>` does not count.

    Empty where there is none, or where it has more than LONGEST characters.
    """
    text = answer.rpartition("</think>")[2]
    found = _blocks(text)
    code = stated(text) if "</answer>" in text else text
    for tags in (_PYTHON, ("",), tuple(tag for tag, _ in found)):
        if fitting := [block for tag, block in found if tag in tags]:
            code = fitting[-1]
            break
    code = code.strip("\n\r")
    return textwrap.dedent(code) if 0 < len(code) <= LONGEST and not code.isspace() else ""


def _blocks(text: str) -> list[tuple[str, str]]:
    """Marks in lower case, and what is between the fences. A block ends at a fence that begins a line, or, where no
    such follows, at the next one."""
    found, place = [], 0
    ends: Iterator[int] = (match.end() for match in _END.finditer(text))
    end = next(ends, -1)
    while (start := text.find(_FENCE, place)) >= 0:
        line = text.find("\n", start, start + _LONGEST_TAG)
        tag = _TAG.fullmatch(text, start + len(_FENCE), line) if line >= 0 else None
        if tag is None:  # within a line
            place = start + len(_FENCE)
            continue
        while 0 <= end <= line:
            end = next(ends, -1)
        stop = end - len(_FENCE) if end >= 0 else text.find(_FENCE, line)
        found.append((tag[1].lower(), text[line + 1 :] if stop < 0 else text[line + 1 : stop]))
        if stop < 0:
            break
        place = stop + len(_FENCE)
    return found
