"""Compare outcomes with expected values, outside the sandbox. Both are plain values; the text may be arbitrary."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

from megarl.rewards.code.plain import Opaque
from megarl.rewards.code.problems import CallTest

TOLERANCE = 1e-6
"""Tolerance for an expected float: relative to its magnitude, absolute below 1."""
_NUMBER = re.compile(r"[+-]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][+-]?\d{1,3})?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)


def is_correct(test: CallTest, value: Any) -> bool:
    """Return whether a value from `decode` is the expected one. NaN never is."""
    try:
        if isinstance(value, Opaque):
            return False
        if test.comparison == "json":
            return matches_json(test.expected, value)
        if test.comparison == "packed":
            return matches_json(test.expected, value) or matches_json(test.expected[0], value)
        if test.comparison == "is":
            return type(value) is type(test.expected) and bool(value == test.expected)
        if test.comparison == "equal":
            return bool(value == test.expected)
        return not hasattr(value, "__next__") and bool(value) is (test.comparison == "true")
    except (TypeError, ValueError, RecursionError, OverflowError):  # an opaque value inside a container
        return False


def matches_json(expected: Any, value: Any) -> bool:
    """Compare as JSON would serialize the value: tuples are lists, keys are strings.

    Expected floats have a tolerance.
    """
    if isinstance(expected, float) and not isinstance(value, bool) and isinstance(value, int | float):
        return is_close(expected, value)
    if isinstance(expected, list):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            return False
        return all(matches_json(one, other) for one, other in zip(expected, value, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or len(value) != len(expected):
            return False
        named = {_key(key): item for key, item in value.items()}
        return named.keys() == expected.keys() and all(matches_json(one, named[key]) for key, one in expected.items())
    return bool(value == expected)


def _key(key: Any) -> Any:
    """Return a dict key as JSON writes it."""
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    if isinstance(key, int) and key.bit_length() < 10_000:
        return str(key)
    return repr(key) if isinstance(key, float) else key


def is_close(expected: float, value: float) -> bool:
    """Compare within `TOLERANCE`. Infinities only equal each other; NaN equals nothing."""
    try:
        return math.isclose(expected, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer too large for a float
        return False


def matches_output(expected: str, printed: str) -> bool:
    """Compare line by line, ignoring trailing spaces and trailing empty lines, else word by word.

    Numbers with a point compare by value: with a tolerance if one is expected, exactly against an expected integer.
    """
    ours, theirs = _lines(expected), _lines(printed)
    if ours == theirs:
        return True
    if len(ours) != len(theirs):
        return False
    return all(
        _same_line(expected_line, printed_line) for expected_line, printed_line in zip(ours, theirs, strict=True)
    )


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    ours, theirs = expected.split(), printed.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    if not _NUMBER.fullmatch(printed) or _INTEGER.fullmatch(printed) and _INTEGER.fullmatch(expected):
        return False
    if _INTEGER.fullmatch(expected):
        return Decimal(expected) == Decimal(printed)
    return bool(_NUMBER.fullmatch(expected)) and is_close(float(expected), float(printed))
