"""Extract the result that an answer states: in a box, between tags, or as a number in prose. Runs in linear time."""

from __future__ import annotations

import re
from decimal import Decimal

# A comma belongs to a number only before groups of three digits: "1,080" is one number, "1, 2" and "1,2" are two.
_DIGITS = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
_SIGN = re.compile(r"(?:^|[^\w)\]}.$])[$]?[-\N{MINUS SIGN}][$]?$")

_GROUPS = re.compile(r"(?<![\d.,])[0-9]{1,3}(?:(?:\\[,;:! ]|\{\\?,\}|[ \u00a0\u202f])[0-9]{3})+(?![0-9])")


def join_thousands(text: str) -> str:
    r"""The text of a result with numbers in one piece: `1 080`, `1\,080`, `1{,}080` become `1080`. In prose the first
    may be two numbers."""
    return _GROUPS.sub(lambda found: re.sub(r"[^0-9]", "", found.group()), text)


def has_false_equation(text: str) -> bool:
    """Whether different numbers stand on two sides of `=`, as in `3 = 5`; such a text states no result."""
    sides = [number for side in text[-1000:].split("=") if (number := parse_number(side)) is not None]
    return len(set(sides)) > 1


def find_numbers(text: str) -> list[Decimal]:
    """All decimal numbers of a text, in order, exact.

    Knows thousands separators, a dollar sign before or behind the minus, and a full stop that ends a sentence. A minus
    is a sign only where nothing stands right before it that could be subtracted from: in "-5" and "= -5", not in "9-5".
    """
    numbers = []
    for match in _DIGITS.finditer(text):
        before = text[max(0, match.start() - 4) : match.start()]
        value = Decimal(match.group().replace(",", ""))
        numbers.append(-value if _SIGN.search(before) else value)
    return numbers


def parse_number(value: object) -> Decimal | None:
    """A ground truth, int, float or text such as "1,080" or "$5.", as an exact number; None where it is not one."""
    text = str(value).strip()
    numbers = find_numbers(text)
    if len(numbers) != 1 or re.sub(r"[-\N{MINUS SIGN}0-9,.$\s]", "", text):
        return None
    return numbers[0]


_BARE = re.compile(r"[^\s$\\{}]{1,50}")


def find_box(text: str) -> int:
    r"""Where the last `\boxed` or `\fbox` begins; -1 where there is none."""
    return max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))


def extract_boxed(text: str) -> str | None:
    r"""What the last `\boxed{}` or `\fbox{}` holds, without spaces around it. None where there is none, or it is never
    closed."""
    start = find_box(text)
    if start < 0:
        return None
    start += len(r"\boxed") if text.startswith(r"\boxed", start) else len(r"\fbox")
    while text[start : start + 1].isspace():
        start += 1
    if text[start : start + 1] == "{":
        inside = extract_braced(text, start)
        return None if inside is None else inside.strip()
    bare = _BARE.match(text, start)  # TeX boxes a single sign without braces, too: \boxed5
    return bare.group() if bare else None


def extract_braced(text: str, start: int) -> str | None:
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


def extract_tagged(text: str, tag: str) -> str | None:
    """What the last `<tag>` that is closed holds, without spaces around it; None where there is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def extract_final_part(text: str) -> str:
    """What is between the last `<answer>` tags; all of the text where there are none, or a box stands behind them."""
    between = extract_tagged(text, "answer")
    return text if between is None or find_box(text) > text.rfind("</answer>") else between


def extract_answer(text: str) -> str:
    """What is between `<answer>` tags, or all of it where there are none."""
    between = extract_tagged(text, "answer")
    return text.strip() if between is None else between
