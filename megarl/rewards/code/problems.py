"""Hidden tests of a problem, whatever data set they are from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

By = Literal["equal", "json", "packed", "is", "true", "false"]
"""How a value is compared: by `==`; as JSON has it (`compare.same_as_json`), or so that a list of one item stands for
the item, too, as in APPS (`packed`); by being that None, True or False; by its truth."""


@dataclass(frozen=True)
class Program:
    """The answer is a program, which reads `stdin` and prints `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Call:
    """The answer has a function. `source` is a call of it, an expression of Python in which the expected value does not
    occur; or it is called `name` with plain `arguments`."""

    expected: Any
    by: By = "equal"
    source: str = ""
    name: str = ""
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Judged:
    """Statements of Python that assert something about the answer's functions, and cannot be taken apart."""

    source: str


Test = Program | Call | Judged


@dataclass(frozen=True)
class Problem:
    """tests: at least one; programs, or calls and judged ones."""

    tests: tuple[Test, ...]
    before: str = ""
    """Python that is run before the answer, in its box: imports, classes that it is given. Holds no expected value."""
    behind: str = ""
    """The same, but run behind the answer, of which it has classes."""
    beginning: str = ""
    """What an answer that is no program of its own goes on from: a signature and a docstring."""
    judge: str = ""
    """Python that judged tests need, in a box of their own."""
    names: tuple[str, ...] = ()
    """Of the answer, that judged tests call."""

    def part(self, most: int) -> Mapping[int, Test]:
        """At most so many tests by their numbers, spread evenly over them, the first and the last among them."""
        count = len(self.tests)
        if count <= most:
            return dict(enumerate(self.tests))
        chosen = {round(number * (count - 1) / max(most - 1, 1)) for number in range(most)}
        return {number: self.tests[number] for number in sorted(chosen)}
