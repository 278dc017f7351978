"""The least that an environment can be: one tool, no state, a reward by whichever function scores the answer."""

from __future__ import annotations

from megarl.rollout.calculator import calculate


class Calculator:
    """Arithmetic by a tool; the reward is `megarl.rewards.arithmetic:arithmetic`."""

    def calculator(self, expression: str) -> str:
        """Evaluates an arithmetic expression.

        Args:
            expression: numbers, operators and parentheses
        """
        return calculate(expression)
