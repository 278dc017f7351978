"""Which engine begins which group, and when enough are complete: counters that all engines of a generation share."""

from __future__ import annotations

import sys
from collections import Counter
from threading import Lock
from typing import Any, Protocol


class SharedStore(Protocol):
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


UNLIMITED = sys.maxsize
"""Groups of a generation that goes on."""


class LocalKVStore:
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


class GroupQueue:
    """The groups of one generation: each goes to the engine that asks next, whichever that is.

    So an engine that is slow holds what it has begun and nothing else; and what one that is lost has not completed is
    given back, for whoever has room. groups: to be begun, with the numbers from 0 on. engines: that share them. board,
    name: where the counters are, and what they are called there; every engine of the generation has the same, and no
    other generation does. carried: groups that engines go on with, besides.
    """

    def __init__(
        self, groups: int, engines: int = 1, board: SharedStore | None = None, name: str = "groups", carried: int = 0
    ) -> None:
        self._num_groups, self.num_engines = groups, engines
        self._store: SharedStore = board or LocalKVStore()
        self._name, self._claimed_key, self._complete_key = name, f"{name}/taken", f"{name}/complete"
        self._reclaimed: set[int] = set()
        """Of what was given back, what somebody has begun again."""
        self.groups_per_engine = -(-(groups + carried) // engines)
        """Groups that an engine has at once where they are dealt out evenly. Nobody is to begin more, or the first to
        come would take all of a small generation, while the others have nothing to do."""

    def claim(self) -> int | None:
        """The number of a group that nobody has begun, which the caller does; None where all are."""
        if self.count_claimed() == self._num_groups:
            return None  # without a count more, for who asks again and again
        number = self._store.add(self._claimed_key, 1) - 1
        return number if number < self._num_groups else None

    def count_claimed(self) -> int:
        """How many groups were begun: those with the numbers below this one."""
        return min(self._store.add(self._claimed_key, 0), self._num_groups)

    def mark_complete(self, of: int = 0) -> int:
        """Say that a group is complete. How many were so before, over all engines: no two are told the same. of: what
        is counted by itself, where not all of them are one."""
        return self._store.add(f"{self._complete_key}/{of}", 1) - 1

    def count_complete(self, of: int = 0) -> int:
        """How many groups are complete."""
        return self._store.add(f"{self._complete_key}/{of}", 0)

    def count_aborted(self, more: int = 0) -> int:
        """How many conversations are aborted, over all engines, with so many more."""
        return self._store.add(f"{self._name}/aborted", more)

    # --- engines that are lost

    def return_group(self, what: Any) -> None:
        """Leave a group that was begun, which another engine is to complete: plain data."""
        place = self._store.add(f"{self._name}/back", 1) - 1
        self._store.put(f"{self._name}/back/{place}", what)
        self._store.add(f"{self._name}/there/{place}", 1)

    def claim_returned(self) -> Any | None:
        """A group that was given back, which the caller completes; None where there is none."""
        for place in range(self._store.add(f"{self._name}/back", 0)):
            if place in self._reclaimed or not self._store.add(f"{self._name}/there/{place}", 0):
                continue
            self._reclaimed.add(place)
            if self._store.add(f"{self._name}/again/{place}", 1) == 1:
                self._store.add(f"{self._name}/again", 1)
                return self._store.get(f"{self._name}/back/{place}")
        return None

    def count_unclaimed(self) -> int:
        """Groups that nobody has begun, or begun again."""
        back, again = (self._store.add(f"{self._name}/{which}", 0) for which in ("back", "again"))
        return self._num_groups - self.count_claimed() + back - again

    def count_lost_engines(self, more: int = 0) -> int:
        """How many of the engines are lost, with so many more."""
        return self._store.add(f"{self._name}/lost", more)
