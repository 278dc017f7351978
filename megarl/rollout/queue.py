"""Which engine begins which group, and when enough are complete: counters that all engines of a generation share."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from threading import Lock

Add = Callable[[str, int], int]
"""(name, more) -> what the counter of this name is with so many more; one step, whoever else counts meanwhile."""


ENDLESS = sys.maxsize
"""Groups of a generation that goes on."""


class Counts:
    """Counters of one process, for engines that it feeds itself."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def add(self, name: str, more: int) -> int:
        with self._lock:
            self._counts[name] += more
            return self._counts[name]


def under_way(needed: int, oversample: float) -> int:
    """Groups that a step has under way at most, those of earlier steps among them, where it needs so many."""
    return math.ceil(round(oversample * needed, 6))  # 1.1 * 10 is a little more than 11


class Tickets:
    """The groups of one generation: each goes to the engine that asks next, whichever that is.

    So an engine that is slow, or lost, holds what it has begun and nothing else. groups: to be begun, with the numbers
    from 0 on. engines: that share them. add, name: where the counters are, and what they are called there; every engine
    of the generation has the same, and no other generation does. carried: groups that engines go on with, besides.
    """

    def __init__(
        self, groups: int, engines: int = 1, add: Add | None = None, name: str = "groups", carried: int = 0
    ) -> None:
        self._groups = groups
        self._add = add or Counts().add
        self._taken, self._complete = f"{name}/taken", f"{name}/complete"
        self.share = -(-(groups + carried) // engines)
        """Groups that an engine has at once where they are dealt out evenly. Nobody is to begin more, or the first to
        come would take all of a small generation, while the others have nothing to do."""

    def take(self) -> int | None:
        """The number of a group that nobody has begun, which the caller does; None where all are."""
        number = self._add(self._taken, 1) - 1
        return number if number < self._groups else None

    def taken(self) -> int:
        """How many groups were begun: those with the numbers below this one."""
        return min(self._add(self._taken, 0), self._groups)

    def finish(self) -> int:
        """Say that a group is complete. How many were so before, over all engines: no two are told the same."""
        return self._add(self._complete, 1) - 1

    def finished(self) -> int:
        """How many groups are complete."""
        return self._add(self._complete, 0)
