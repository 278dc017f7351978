"""A game of several turns: guess a number."""

from __future__ import annotations

from typing import Any


class Guess:
    """`ground_truth` is the number, from 1 to `most`. The reward is 1 if it was guessed, minus `cost` for each further
    try; a guess that earlier answers exclude counts as two tries."""

    most = 100
    cost = 0.02

    def reset(self, ground_truth: int, most: int = 0) -> None:
        self._number, self._range = int(ground_truth), (1, most or self.most)
        self._tries, self._is_solved = 0, False

    def guess(self, number: int) -> str:
        """Guess the number. The answer is `higher`, `lower` or `right`.

        Args:
            number: a whole number
        """
        if self._is_solved:
            return "right, and already guessed"
        least, most = self._range
        self._tries += 1 + (not least <= number <= most)
        if number == self._number:
            self._is_solved = True
            return "right"
        if number < self._number:
            self._range = (max(least, number + 1), most)
            return "higher"
        self._range = (least, min(most, number - 1))
        return "lower"

    def reward(self) -> dict[str, Any]:
        reward = max(0.0, 1.0 - self.cost * (self._tries - 1)) if self._is_solved else 0.0
        return {"reward": reward, "parts": {"tries": self._tries}}
