"""A calculator as a tool and as an environment. It never runs an expression as Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from megarl.environments.tools import Tool

_MAX_CHARS = 200
_MAX_BITS = 512  # of an intermediate integer, to bound the cost of an expression
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression as text; whole results of / have no fraction.

    Raises ValueError, worded for the policy, for anything else, division by zero, and numbers of more than 512 bits.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression is longer than {_MAX_CHARS} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the number is too large") from None
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _evaluate(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _check_size(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        operand = _evaluate(node.operand)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow):
            size = left.bit_length() if isinstance(left, int) else 1
            if abs(right) * max(size, 1) > _MAX_BITS:
                raise ValueError("the power is too large")
        return _check_size(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def _check_size(value: int | float | complex) -> int | float:
    if isinstance(value, complex) or value != value or value in (float("inf"), float("-inf")):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("the number is too large")
    return value


calculator = Tool(
    schema={
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    },
    function=calculate,
)


class Calculator:
    """Arithmetic by a tool; the reward is `megarl.rewards.arithmetic:arithmetic`."""

    def calculator(self, expression: str) -> str:
        """Evaluates an arithmetic expression.

        Args:
            expression: numbers, operators and parentheses
        """
        return calculate(expression)
