"""The calculator tool: values and refusals."""

import pytest

from megarl.environments.ready.calculator import calculate

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2", "3"),
        (" (12 + 7) * 3 ", "57"),
        ("-4 - -6", "2"),
        ("10 / 4", "2.5"),
        ("10 / 5", "2"),
        ("17 // 5", "3"),
        ("17 % 5", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
    ],
)
def test_evaluates_expressions(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "power is too large"),
        ("10 ** 1000", "power is too large"),
        ("(2 ** 500) * (2 ** 500)", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("__import__('os')", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("1 +", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("1" * 300, "longer than"),
        ("(" * 150 + "1" + ")" * 40, "not an arithmetic expression"),
    ],
)
def test_refuses_other_expressions(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calculate(expression)
