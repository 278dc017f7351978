"""What an answer states as its result: in a box, or between tags. Each character is looked at a few times at most."""

from __future__ import annotations

import re

_BARE = re.compile(r"[^\s$\\{}]{1,50}")


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{}` or `\fbox{}` holds, without spaces around it. None where there is none, or it is never
    closed."""
    start = max(text.rfind(command) + len(command) if command in text else -1 for command in (r"\boxed", r"\fbox"))
    if start < 0:
        return None
    while text[start : start + 1].isspace():
        start += 1
    if text[start : start + 1] == "{":
        inside = braced(text, start)
        return None if inside is None else inside.strip()
    bare = _BARE.match(text, start)  # TeX boxes a single sign without braces, too: \boxed5
    return bare.group() if bare else None


def braced(text: str, start: int) -> str | None:
    r"""What the braces that open at `start` hold, where `\{` and `\}` are none; None where none open, or they are
    never closed."""
    if text[start : start + 1] != "{":
        return None
    depth, place = 0, start
    while place < len(text):
        if text[place] == "\\":
            place += 1
        elif text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : place]
        place += 1
    return None


def tagged(text: str, tag: str) -> str | None:
    """What the last `<tag>` that is closed holds, without spaces around it; None where there is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def stated(text: str) -> str:
    """What is between `<answer>` tags, or all of it where there are none."""
    between = tagged(text, "answer")
    return text.strip() if between is None else between
