"""Extract the result that an answer states: in a box, between tags, or as a number in prose. Runs in linear time."""

from __future__ import annotations

import re
from decimal import Decimal

# A comma belongs to a number only before groups of three digits: "1,080" is one number, "1, 2" and "1,2" are two.
_DIGITS = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
_SIGN = re.compile(r"(?:^|[^\w)\]}.$])[$]?[-\N{MINUS SIGN}][$]?$")

_GROUPS = re.compile(r"(?<![\d.,])[0-9]{1,3}(?:(?:\\[,;:! ]|\{\\?,\}|[ \u00a0\u202f])[0-9]{3})+(?![0-9])")


def join_thousands(text: str) -> str:
    r"""Join the digit groups of a result, not of prose: `1 080`, `1\,080`, `1{,}080` become `1080`."""
    return _GROUPS.sub(lambda match: re.sub(r"[^0-9]", "", match.group()), text)


def has_false_equation(text: str) -> bool:
    """Return whether two sides of `=` are different numbers, as in `3 = 5`. Such a text states no result."""
    sides = [number for side in text[-1000:].split("=") if (number := parse_number(side)) is not None]
    return len(set(sides)) > 1


def find_numbers(text: str) -> list[Decimal]:
    """Return all decimal numbers of a text, in order and exact.

    Handles thousands separators, a dollar sign before or after the minus, and a full stop at the end of a sentence. A
    minus is a sign only if nothing that it could subtract from stands right before it: in "-5" and "= -5", not in
    "9-5".
    """
    numbers = []
    for match in _DIGITS.finditer(text):
        before = text[max(0, match.start() - 4) : match.start()]
        value = Decimal(match.group().replace(",", ""))
        numbers.append(-value if _SIGN.search(before) else value)
    return numbers


def parse_number(value: object) -> Decimal | None:
    """Return a ground truth (an int, a float, or a text such as "1,080" or "$5.") as an exact number, or None."""
    text = str(value).strip()
    numbers = find_numbers(text)
    if len(numbers) != 1 or re.sub(r"[-\N{MINUS SIGN}0-9,.$\s]", "", text):
        return None
    return numbers[0]


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character
_BARE = re.compile(r"[^\s$\\{}]{1,50}")


def find_box(text: str) -> int:
    r"""Return the index of the last `\boxed` or `\fbox`, -1 without one."""
    return max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))


def extract_boxed(text: str) -> str | None:
    r"""Return the stripped content of the last `\boxed{}` or `\fbox{}`; None without one or if it is unclosed."""
    start = find_box(text)
    if start < 0:
        return None
    text = text[start:].removeprefix(r"\boxed").removeprefix(r"\fbox").lstrip()
    if text.startswith("{"):
        content = extract_braced(text, 0)
        return None if content is None else content.strip()
    token = _BARE.match(text)  # TeX also boxes a single token without braces: \boxed5
    return token.group() if token else None


def extract_braced(text: str, start: int) -> str | None:
    r"""Return the content of the braces that open at `start`, or None if none do or they are unclosed. `\{` is none."""
    if text[start : start + 1] != "{":
        return None
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[start + 1 : match.start()]
    return None


def extract_tagged(text: str, tag: str) -> str | None:
    """Return the stripped content of the last closed `<tag>`, or None."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def extract_final_part(text: str) -> str:
    """Return the content of the last `<answer>` tags; the whole text without tags or if a box follows them."""
    tagged = extract_tagged(text, "answer")
    return text if tagged is None or find_box(text) > text.rfind("</answer>") else tagged


def extract_answer(text: str) -> str:
    """Return the content of the `<answer>` tags, or the whole text without any."""
    tagged = extract_tagged(text, "answer")
    return text.strip() if tagged is None else tagged
