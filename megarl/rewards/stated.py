"""What an answer states as its result: in a box, or between tags. Each character is looked at a few times at most."""

from __future__ import annotations

import re

_BARE = re.compile(r"[^\s$\\{}]{1,50}")


def box_start(text: str) -> int:
    r"""Where the last `\boxed` or `\fbox` begins; -1 where there is none."""
    return max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{}` or `\fbox{}` holds, without spaces around it. None where there is none, or it is never
    closed."""
    start = box_start(text)
    if start < 0:
        return None
    start += len(r"\boxed") if text.startswith(r"\boxed", start) else len(r"\fbox")
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


def final_part(text: str) -> str:
    """What is between the last `<answer>` tags; all of the text where there are none, or a box stands behind them."""
    between = tagged(text, "answer")
    return text if between is None or box_start(text) > text.rfind("</answer>") else between


def stated(text: str) -> str:
    """What is between `<answer>` tags, or all of it where there are none."""
    between = tagged(text, "answer")
    return text.strip() if between is None else between
