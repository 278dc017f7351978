"""Nests that wait, so that a box is there when it is asked for.

They are made like the boxes that were asked for more than once of late: same command, same memory. Each is given away
once and ended with its box; those that wait are few, and are ended where nobody wants them any more.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

from megarl.sandbox.namespace import BoxNamespace, BoxSpec, NamespaceHost

MAX_IDLE, MAX_IDLE_PER_SPEC = 8, 4
"""Nests that wait, all together and of one form."""
_REMEMBERED = 16
"""Forms; a policy's programs that are commands of their own are many, and come once each."""
IDLE_S = 60.0
_STALE_S = 5.0
"""Since when nobody has asked for what makes room for another form; else three forms in turn would end each other's."""
AGAIN_S = 1.0
"""Between one that was lost, or could not be made, and the next."""


@dataclass
class _Demand:
    times: int
    last: float
    disk_limits: tuple[int, int]

    def compute_target(self) -> int:
        return min(MAX_IDLE_PER_SPEC, self.times - 1)


class WarmPool:
    """Of one process that starts boxes, and of its event loop."""

    def __init__(self, home: NamespaceHost, most: int) -> None:
        self._host = home
        self._max_idle = min(MAX_IDLE, most) if home.spawner.is_boxed else 0
        self._idle: list[BoxNamespace] = []
        self._demand: OrderedDict[BoxSpec, _Demand] = OrderedDict()  # the latest last
        self._numbers = itertools.count(1)
        self._retry_at = 0.0

    def take(self, form: BoxSpec, disk_mb: int, files: int) -> BoxNamespace:
        """One that nobody had before: one that waits, else a new one. Raises OSError."""
        before = self._demand.pop(form, None)
        times = before.times + 1 if before else 1
        self._demand[form] = _Demand(times, time.monotonic(), (disk_mb, files))
        while len(self._demand) > _REMEMBERED:
            self._forget(next(iter(self._demand)))
        for nest in self._list_idle(form):
            self._idle.remove(nest)
            try:
                if nest.is_alive():
                    nest.resize(disk_mb, files)
                    return nest
            except OSError:  # too small for what is asked of it now: another one says why
                pass
            _discard(nest)
        return self._create(form, disk_mb, files)

    def refill(self, now: float) -> float:
        """Make one if there is one to be made, and end those that nobody wants any more; when to come again."""
        for form, asked in tuple(self._demand.items()):
            if now >= asked.last + IDLE_S:
                self._forget(form)
        soonest = min((asked.last for asked in self._demand.values()), default=now) + IDLE_S
        lacking = self._find_missing_spec(now)
        if lacking is None:
            return soonest
        if now < self._retry_at:
            return min(soonest, self._retry_at)
        try:
            nest = self._create(lacking, *self._demand[lacking].disk_limits)
        except OSError:
            self._retry_at = now + AGAIN_S
            return min(soonest, self._retry_at)
        nest.on_exited = partial(self._on_lost, nest)
        self._idle.append(nest)
        return now

    def close(self) -> None:
        """Kill all that wait."""
        for nest in self._idle:
            _discard(nest)
        self._idle = []
        self._demand.clear()

    def _list_idle(self, form: BoxSpec) -> list[BoxNamespace]:
        return [nest for nest in self._idle if nest.spec == form]

    def _find_missing_spec(self, now: float) -> BoxSpec | None:
        """The form, the latest first, of which there are too few, and for which there is room."""
        for form, asked in reversed(self._demand.items()):
            if len(self._list_idle(form)) < asked.compute_target() and (
                len(self._idle) < self._max_idle or self._make_room(now)
            ):
                return form
        return None

    def _make_room(self, now: float) -> bool:
        for form, asked in self._demand.items():
            if now < asked.last + _STALE_S:
                return False
            if alike := self._list_idle(form):
                self._idle.remove(alike[0])
                _discard(alike[0])
                return True
        return False

    def _forget(self, form: BoxSpec) -> None:
        del self._demand[form]
        for nest in self._list_idle(form):
            self._idle.remove(nest)
            _discard(nest)

    def _on_lost(self, nest: BoxNamespace) -> None:
        """It has ended while it waited."""
        self._idle.remove(nest)
        nest.remove()
        self._retry_at = time.monotonic() + AGAIN_S
        if not nest.init_pid and nest.spec in self._demand:  # there can be none: whoever asks next is told why
            self._forget(nest.spec)

    def _create(self, form: BoxSpec, disk_mb: int, files: int) -> BoxNamespace:
        nest = BoxNamespace(self._host, next(self._numbers), form, disk_mb, files)
        try:
            nest.start()
        except BaseException:
            nest.remove()
            raise
        return nest


def _discard(nest: BoxNamespace) -> None:
    nest.on_exited = nest.remove
    nest.kill()
