"""Numbers in prose."""

from __future__ import annotations

import re
from decimal import Decimal

# A comma belongs to a number only before groups of three digits: "1,080" is one number, "1, 2" and "1,2" are two.
_DIGITS = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
_SIGN = re.compile(r"(?:^|[^\w)\]}.$])[$]?[-\N{MINUS SIGN}][$]?$")


def numbers_in(text: str) -> list[Decimal]:
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


def as_number(value: object) -> Decimal | None:
    """A ground truth, int, float or text such as "1,080" or "$5.", as an exact number; None where it is not one."""
    text = str(value).strip()
    numbers = numbers_in(text)
    if len(numbers) != 1 or re.sub(r"[-\N{MINUS SIGN}0-9,.$\s]", "", text):
        return None
    return numbers[0]
