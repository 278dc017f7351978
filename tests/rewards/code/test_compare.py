"""Compare values and printed output with the expected ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.code.grading import is_close, is_correct, matches_json, matches_output
from megarl.rewards.code.plain import Opaque
from megarl.rewards.code.problems import CallTest

pytestmark = pytest.mark.alone

NAN = math.nan


@pytest.mark.parametrize(
    ("expected", "tolerance", "value", "is_match"),
    [
        (2, "equal", 2, True),
        (2, "equal", 2.0, True),
        (2, "equal", "2", False),
        ([1, 2], "equal", (1, 2), False),
        (True, "is", True, True),
        (True, "is", 1, False),
        (None, "is", None, True),
        (None, "is", 0, False),
        (None, "true", [1], True),
        (None, "true", [], False),
        (None, "false", 0, True),
        (None, "false", iter([]), False),
        (None, "true", Opaque("x"), False),
        (None, "false", Opaque("x"), False),
        (1, "equal", Opaque("x"), False),
        ([1], "equal", [Opaque("x")], False),
        (NAN, "equal", NAN, False),
        ([NAN], "equal", [float("nan")], False),
        ([5], "packed", 5, True),
        ([5], "packed", [5], True),
        ([5], "packed", 6, False),
        ([5], "json", 5, False),
    ],
)
def test_compares_values(expected: Any, tolerance: Any, value: Any, is_match: bool) -> None:
    assert is_correct(CallTest(expected, tolerance), value) is is_match


@pytest.mark.parametrize(
    ("expected", "value", "is_match"),
    [
        ([1, [2, 3]], (1, (2, 3)), True),
        ([1, 2], [1, 2, 3], False),
        ([1, 2], {1, 2}, False),
        ("ab", ["a", "b"], False),
        ({"1": [2]}, {1: (2,)}, True),
        ({"1": 2}, {1: 2, 3: 4}, False),
        ({"null": 1, "true": 2}, {None: 1, True: 2}, True),
        ({}, [], False),
        (True, 1, True),
        (None, None, True),
        (None, 0, False),
        (0.5, 0.5 + 1e-9, True),
        (0.5, 0.51, False),
        (2.0, 2, True),
        (1.0, True, True),
        (0.5, NAN, False),
        (0.5, "0.5", False),
        (1e300, 10**400, False),
        (0.1, Opaque("x"), False),
    ],
)
def test_compares_values_as_json(expected: Any, value: Any, is_match: bool) -> None:
    assert is_correct(CallTest(expected, "json"), value) is is_match


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda left: st.lists(left) | st.dictionaries(st.text(), left),
)


@given(PLAIN, PLAIN)
def test_json_comparison_agrees_with_equality(left: Any, right: Any) -> None:
    assert matches_json(left, left) and matches_json(left, right) == (left == right)


def test_compares_numbers_with_tolerance() -> None:
    assert is_close(1.0, 1.0 + 9e-7) and not is_close(1.0, 1.0 + 2e-6)
    assert is_close(1e9, 1e9 + 900) and not is_close(1e9, 1e9 + 1100)
    assert (
        is_close(math.inf, math.inf)
        and not is_close(math.inf, 1e308)
        and not is_close(NAN, NAN)
        and not is_close(0.0, NAN)
    )


@pytest.mark.parametrize(
    ("expected", "printed", "is_match"),
    [
        ("2", "2\n", True),
        ("2\n", "2", True),
        ("a b\nc\n", "a b  \nc\n\n\n", True),
        ("a b\r\nc", "a b\nc", True),
        ("a  b", "a b", True),
        ("a b", "ab", False),
        ("a\nb", "a b", False),
        ("a\n\nb", "a\nb", False),
        (" a", "a", True),
        ("0.50", "0.5000001", True),
        ("0.5", ".5", True),
        ("0.5", "0.6", False),
        ("0.5", "nan", False),
        ("0.5", "0_5", False),
        ("0.5", "0.5 0.5", False),
        ("1e3", "1000", True),
        ("5", "5.0", True),
        ("5", "5.0000001", False),
        ("12345678901234567890", "1.234567890123456789e19", True),
        ("12345678901234567890", "12345678901234567891.0", False),
        ("5", "05", False),
        ("nan", "nan", True),
        ("inf", "1e999", False),
        ("YES", "yes", False),
        ("", "", True),
        ("", "\n \n", True),
        ("1", "", False),
        ("1" * 5000, "1" * 5000, True),
        ("1" * 5000 + ".0", "1" * 5000, False),
    ],
)
def test_compares_printed_output(expected: str, printed: str, is_match: bool) -> None:
    assert matches_output(expected, printed) is is_match


@given(st.text(), st.text())
def test_any_output_can_be_compared(left: str, right: str) -> None:
    assert matches_output(left, left) and type(matches_output(left, right)) is bool
