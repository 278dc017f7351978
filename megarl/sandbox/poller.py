"""Ends of pipes and sockets, waited for all at once and never waited on one at a time."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

_PIECE = 1 << 16


class Poller:
    """Those that somebody listens to, and those that still have something to take."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._polled: dict[int, int] = {}
        self._listeners: dict[int, Callable[[], None]] = {}
        self._pending: dict[int, bytearray] = {}
        self._closing: set[int] = set()

    def listen(self, end: int, listener: Callable[[], None]) -> None:
        """Call it whenever there is something to read, or the other end was closed."""
        os.set_blocking(end, False)
        self._listeners[end] = listener
        self._update(end)

    def send(self, end: int, data: bytes, last: bool = False) -> None:
        """Write as the other end takes it; it is closed after the `last`."""
        if last:
            self._closing.add(end)
        os.set_blocking(end, False)
        self._pending.setdefault(end, bytearray()).extend(data)
        self._write(end)

    def close(self, end: int) -> None:
        """Whatever it had still to take."""
        self._listeners.pop(end, None)
        self._pending.pop(end, None)
        self._closing.discard(end)
        self._update(end)
        os.close(end)

    def wait(self, seconds: float) -> None:
        """Until something happens, at most so long; tell the listeners."""
        for end, events in self._poll.poll(max(0.0, seconds)):
            if events & ~select.EPOLLIN and end in self._pending:
                self._write(end)
            if events & ~select.EPOLLOUT and end in self._listeners:
                self._listeners[end]()

    def _write(self, end: int) -> None:
        data, done = self._pending[end], 0
        try:
            while done < len(data):
                done += os.write(end, data[done : done + _PIECE])
        except BlockingIOError:
            del data[:done]
            self._update(end)
            return
        except OSError:  # nobody reads it any more
            pass
        del self._pending[end]
        if end in self._closing:
            self.close(end)
        else:
            self._update(end)

    def _update(self, end: int) -> None:
        wanted = (select.EPOLLIN if end in self._listeners else 0) | (select.EPOLLOUT if end in self._pending else 0)
        there = self._polled.get(end, 0)
        if wanted == there:
            return
        if not wanted:
            self._poll.unregister(end)
            del self._polled[end]
            return
        if there:
            self._poll.modify(end, wanted)
        else:
            self._poll.register(end, wanted)
        self._polled[end] = wanted
