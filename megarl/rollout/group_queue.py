"""Which engine begins which group, and when enough are complete: counters that all engines of a generation share."""

from __future__ import annotations

import sys
from collections import Counter
from threading import Lock
from typing import Any, Protocol


class Board(Protocol):
    """What all engines of a job see: counters, and notes by name."""

    def add(self, name: str, more: int) -> int:
        """What the counter of this name is with so many more; one step, whoever else counts meanwhile."""
        ...

    def put(self, name: str, note: Any) -> None:
        """note: plain data, see `parallel.encoding`."""
        ...

    def get(self, name: str) -> Any:
        """A note that was put there; it is gone then."""
        ...


ENDLESS = sys.maxsize
"""Groups of a generation that goes on."""


class Counts:
    """The board of one process, for engines that it feeds itself."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._notes: dict[str, Any] = {}
        self._lock = Lock()

    def add(self, name: str, more: int) -> int:
        with self._lock:
            self._counts[name] += more
            return self._counts[name]

    def put(self, name: str, note: Any) -> None:
        self._notes[name] = note

    def get(self, name: str) -> Any:
        return self._notes.pop(name)


class Tickets:
    """The groups of one generation: each goes to the engine that asks next, whichever that is.

    So an engine that is slow holds what it has begun and nothing else; and what one that is lost has not completed is
    given back, for whoever has room. groups: to be begun, with the numbers from 0 on. engines: that share them. board,
    name: where the counters are, and what they are called there; every engine of the generation has the same, and no
    other generation does. carried: groups that engines go on with, besides.
    """

    def __init__(
        self, groups: int, engines: int = 1, board: Board | None = None, name: str = "groups", carried: int = 0
    ) -> None:
        self._groups, self.engines = groups, engines
        self._board: Board = board or Counts()
        self._name, self._taken, self._complete = name, f"{name}/taken", f"{name}/complete"
        self._gone: set[int] = set()
        """Of what was given back, what somebody has begun again."""
        self.share = -(-(groups + carried) // engines)
        """Groups that an engine has at once where they are dealt out evenly. Nobody is to begin more, or the first to
        come would take all of a small generation, while the others have nothing to do."""

    def take(self) -> int | None:
        """The number of a group that nobody has begun, which the caller does; None where all are."""
        if self.taken() == self._groups:
            return None  # without a count more, for who asks again and again
        number = self._board.add(self._taken, 1) - 1
        return number if number < self._groups else None

    def taken(self) -> int:
        """How many groups were begun: those with the numbers below this one."""
        return min(self._board.add(self._taken, 0), self._groups)

    def finish(self, of: int = 0) -> int:
        """Say that a group is complete. How many were so before, over all engines: no two are told the same. of: what
        is counted by itself, where not all of them are one."""
        return self._board.add(f"{self._complete}/{of}", 1) - 1

    def finished(self, of: int = 0) -> int:
        """How many groups are complete."""
        return self._board.add(f"{self._complete}/{of}", 0)

    def aborted(self, more: int = 0) -> int:
        """How many conversations are aborted, over all engines, with so many more."""
        return self._board.add(f"{self._name}/aborted", more)

    # --- engines that are lost

    def give_back(self, what: Any) -> None:
        """Leave a group that was begun, which another engine is to complete: plain data."""
        place = self._board.add(f"{self._name}/back", 1) - 1
        self._board.put(f"{self._name}/back/{place}", what)
        self._board.add(f"{self._name}/there/{place}", 1)

    def take_back(self) -> Any | None:
        """A group that was given back, which the caller completes; None where there is none."""
        for place in range(self._board.add(f"{self._name}/back", 0)):
            if place in self._gone or not self._board.add(f"{self._name}/there/{place}", 0):
                continue
            self._gone.add(place)
            if self._board.add(f"{self._name}/again/{place}", 1) == 1:
                self._board.add(f"{self._name}/again", 1)
                return self._board.get(f"{self._name}/back/{place}")
        return None

    def left(self) -> int:
        """Groups that nobody has begun, or begun again."""
        back, again = (self._board.add(f"{self._name}/{which}", 0) for which in ("back", "again"))
        return self._groups - self.taken() + back - again

    def lost(self, more: int = 0) -> int:
        """How many of the engines are lost, with so many more."""
        return self._board.add(f"{self._name}/lost", more)
