"""Find and parse the numbers in a text."""

from decimal import Decimal

import pytest

from megarl.rewards.stated_answer import find_numbers, parse_number

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    "text, expected",
    [
        ("none", []),
        ("-5", ["-5"]),
        ("\u22125", ["-5"]),
        ("= -5.", ["-5"]),
        ("9-5", ["9", "5"]),
        ("9 - 5", ["9", "5"]),
        ("(3)-2", ["3", "2"]),
        ("$-1,080.50 or -$3", ["-1080.50", "-3"]),
        ("1,2 and 1, 2", ["1", "2", "1", "2"]),
        ("12,345,678.", ["12345678"]),
        ("1,2345", ["1", "2345"]),
        ("half is .5", [".5"]),
        ("72.0.", ["72.0"]),
        ("H2O", ["2"]),
    ],
)
def test_finds_numbers_in_text(text, expected):
    assert find_numbers(text) == [Decimal(number) for number in expected]


@pytest.mark.parametrize(
    "value, expected",
    [(72, 72), (72.5, 72.5), ("72", 72), (" $1,080. ", 1080), (-3, -3), ("\u22123", -3)],
)
def test_parses_numbers(value, expected):
    assert parse_number(value) == Decimal(str(expected))


@pytest.mark.parametrize("value", [None, "", "seven", "7 apples", "7 8", True])
def test_parse_number_returns_none_for_other_values(value):
    assert parse_number(value) is None
