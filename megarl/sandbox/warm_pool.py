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

from megarl.sandbox.namespace import Form, Home, Nest

MOST, MOST_ALIKE = 8, 4
"""Nests that wait, all together and of one form."""
_REMEMBERED = 16
"""Forms; a policy's programs that are commands of their own are many, and come once each."""
IDLE_S = 60.0
_STALE_S = 5.0
"""Since when nobody has asked for what makes room for another form; else three forms in turn would end each other's."""
AGAIN_S = 1.0
"""Between one that was lost, or could not be made, and the next."""


@dataclass
class _Asked:
    times: int
    last: float
    room: tuple[int, int]

    def wanted(self) -> int:
        return min(MOST_ALIKE, self.times - 1)


class Nests:
    """Of one process that starts boxes, and of its event loop."""

    def __init__(self, home: Home, most: int) -> None:
        self._home = home
        self._most = min(MOST, most) if home.spawner.boxed else 0
        self._waiting: list[Nest] = []
        self._asked: OrderedDict[Form, _Asked] = OrderedDict()  # the latest last
        self._numbers = itertools.count(1)
        self._not_before = 0.0

    def take(self, form: Form, disk_mb: int, files: int) -> Nest:
        """One that nobody had before: one that waits, else a new one. Raises OSError."""
        before = self._asked.pop(form, None)
        times = before.times + 1 if before else 1
        self._asked[form] = _Asked(times, time.monotonic(), (disk_mb, files))
        while len(self._asked) > _REMEMBERED:
            self._forget(next(iter(self._asked)))
        for nest in self._alike(form):
            self._waiting.remove(nest)
            try:
                if nest.alive():
                    nest.fit(disk_mb, files)
                    return nest
            except OSError:  # too small for what is asked of it now: another one says why
                pass
            _end(nest)
        return self._new(form, disk_mb, files)

    def refill(self, now: float) -> float:
        """Make one if there is one to be made, and end those that nobody wants any more; when to come again."""
        for form, asked in tuple(self._asked.items()):
            if now >= asked.last + IDLE_S:
                self._forget(form)
        soonest = min((asked.last for asked in self._asked.values()), default=now) + IDLE_S
        lacking = self._lacking(now)
        if lacking is None:
            return soonest
        if now < self._not_before:
            return min(soonest, self._not_before)
        try:
            nest = self._new(lacking, *self._asked[lacking].room)
        except OSError:
            self._not_before = now + AGAIN_S
            return min(soonest, self._not_before)
        nest.over = partial(self._lost, nest)
        self._waiting.append(nest)
        return now

    def end(self) -> None:
        """Kill all that wait."""
        for nest in self._waiting:
            _end(nest)
        self._waiting = []
        self._asked.clear()

    def _alike(self, form: Form) -> list[Nest]:
        return [nest for nest in self._waiting if nest.form == form]

    def _lacking(self, now: float) -> Form | None:
        """The form, the latest first, of which there are too few, and for which there is room."""
        for form, asked in reversed(self._asked.items()):
            if len(self._alike(form)) < asked.wanted() and (len(self._waiting) < self._most or self._make_room(now)):
                return form
        return None

    def _make_room(self, now: float) -> bool:
        for form, asked in self._asked.items():
            if now < asked.last + _STALE_S:
                return False
            if alike := self._alike(form):
                self._waiting.remove(alike[0])
                _end(alike[0])
                return True
        return False

    def _forget(self, form: Form) -> None:
        del self._asked[form]
        for nest in self._alike(form):
            self._waiting.remove(nest)
            _end(nest)

    def _lost(self, nest: Nest) -> None:
        """It has ended while it waited."""
        self._waiting.remove(nest)
        nest.remove()
        self._not_before = time.monotonic() + AGAIN_S
        if not nest.first and nest.form in self._asked:  # there can be none: whoever asks next is told why
            self._forget(nest.form)

    def _new(self, form: Form, disk_mb: int, files: int) -> Nest:
        nest = Nest(self._home, next(self._numbers), form, disk_mb, files)
        try:
            nest.start()
        except BaseException:
            nest.remove()
            raise
        return nest


def _end(nest: Nest) -> None:
    nest.over = nest.remove
    nest.kill()
