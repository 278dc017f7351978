"""Assign groups to engines and count complete ones, with counters shared by all engines of a generation."""

from __future__ import annotations

import sys
from collections import Counter
from threading import Lock
from typing import Any, Protocol


class SharedStore(Protocol):
    """Key-value store shared by all engines of a job: atomic counters, and values by name."""

    def add(self, name: str, more: int) -> int:
        """Add `more` to the counter atomically and return its new value."""
        ...

    def put(self, name: str, value: Any) -> None:
        """Store a value of plain data, see `parallel.encoding`."""
        ...

    def get(self, name: str) -> Any:
        """Remove and return a stored value."""
        ...

    def remove(self, name: str) -> None:
        """Remove a counter."""
        ...


UNLIMITED = sys.maxsize
"""Number of groups in continuous generation."""


class LocalKVStore:
    """Store of one process, for the engines it drives itself."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._values: dict[str, Any] = {}
        self._lock = Lock()

    def add(self, name: str, more: int) -> int:
        with self._lock:
            self._counts[name] += more
            return self._counts[name]

    def put(self, name: str, value: Any) -> None:
        self._values[name] = value

    def get(self, name: str) -> Any:
        return self._values.pop(name)

    def remove(self, name: str) -> None:
        with self._lock:
            self._counts.pop(name, None)


class GroupQueue:
    """The groups of one generation, each claimed by the next engine that asks.

    A slow engine thus holds only the groups it has started, and a lost engine's incomplete groups return to the queue.

    Args:
        num_groups: number of groups to start
        store, name: store of the counters and their prefix in it, the same for all engines of this generation and used
            by no other
        first: number of the first group
    """

    def __init__(
        self,
        num_groups: int,
        num_engines: int = 1,
        store: SharedStore | None = None,
        name: str = "groups",
        first: int = 0,
    ) -> None:
        self._num_groups, self.num_engines, self.first = num_groups, num_engines, first
        self._store: SharedStore = store or LocalKVStore()
        self._name, self._claimed_key = name, f"{name}/taken"
        self._reclaimed: set[int] = set()
        """Indices of returned groups that some engine has claimed again."""
        self.groups_per_engine = -(-num_groups // num_engines)
        """Maximum number of groups that an engine should start at once. Otherwise the first engine to ask would claim
        all of a small generation while the others idle."""

    def claim(self) -> int | None:
        """Claim the next group and return its number, or None if all are claimed."""
        if self.count_claimed() == self._num_groups:
            return None  # do not count repeated requests
        number = self._store.add(self._claimed_key, 1) - 1
        return self.first + number if number < self._num_groups else None

    def count_claimed(self) -> int:
        """Return how many groups are claimed, which are the first ones."""
        return min(self._store.add(self._claimed_key, 0), self._num_groups)

    def count_aborted(self, increment: int = 0) -> int:
        """Add `increment` aborted conversations and return their number over all engines."""
        return self._store.add(f"{self._name}/aborted", increment)

    # --- lost engines

    def return_group(self, group: Any) -> None:
        """Return a started group (plain data) for another engine to complete."""
        index = self._store.add(f"{self._name}/back", 1) - 1
        self._store.put(f"{self._name}/back/{index}", group)
        self._store.add(f"{self._name}/there/{index}", 1)

    def claim_returned(self) -> Any | None:
        """Claim a returned group, or return None if there is none."""
        for index in range(self._store.add(f"{self._name}/back", 0)):
            if index in self._reclaimed or not self._store.add(f"{self._name}/there/{index}", 0):
                continue
            self._reclaimed.add(index)
            if self._store.add(f"{self._name}/again/{index}", 1) == 1:
                self._store.add(f"{self._name}/again", 1)
                return self._store.get(f"{self._name}/back/{index}")
        return None

    def count_unclaimed(self) -> int:
        """Return how many groups, new or returned, no engine has claimed."""
        num_returned, num_reclaimed = (self._store.add(f"{self._name}/{which}", 0) for which in ("back", "again"))
        return self._num_groups - self.count_claimed() + num_returned - num_reclaimed

    def count_lost_engines(self, increment: int = 0) -> int:
        """Add `increment` lost engines and return their number."""
        return self._store.add(f"{self._name}/lost", increment)

    # --- complete groups of a continuous generation, by their place among all groups of a version of the weights

    def next_place(self, version: int) -> int:
        """Return the place of another complete group, in order of completion."""
        return self._store.add(f"{self._name}/order/{version}", 1) - 1

    def mark_complete(self, version: int, place: int) -> None:
        self._store.add(f"{self._name}/complete/{version}/{place}", 1)

    def is_complete(self, version: int, place: int) -> bool:
        return self._store.add(f"{self._name}/complete/{version}/{place}", 0) > 0

    def unmark(self, version: int, place: int) -> None:
        """Forget a complete group that all engines know of, or that has to be completed again."""
        self._store.remove(f"{self._name}/complete/{version}/{place}")
