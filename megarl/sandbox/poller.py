"""Event loop for file descriptors of pipes and sockets. Only `Poller.wait` blocks."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

_PIECE = 1 << 16


class Poller:
    """Waits for all descriptors that have a listener or unsent data."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._polled: dict[int, int] = {}
        self._listeners: dict[int, Callable[[], None]] = {}
        self._pending: dict[int, bytearray] = {}
        self._closing: set[int] = set()

    def listen(self, end: int, listener: Callable[[], None]) -> None:
        """Call the listener whenever there is something to read, or the other end has closed."""
        os.set_blocking(end, False)
        self._listeners[end] = listener
        self._update(end)

    def send(self, end: int, data: bytes, last: bool = False) -> None:
        """Write as the other end accepts it. After the `last` data the descriptor is closed."""
        if last:
            self._closing.add(end)
        os.set_blocking(end, False)
        self._pending.setdefault(end, bytearray()).extend(data)
        self._write(end)

    def close(self, end: int) -> None:
        """Close a descriptor and discard its unsent data."""
        self._listeners.pop(end, None)
        self._pending.pop(end, None)
        self._closing.discard(end)
        self._update(end)
        os.close(end)

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for events and call the listeners."""
        for fd, events in self._poll.poll(max(0.0, seconds)):
            if events & ~select.EPOLLIN and fd in self._pending:
                self._write(fd)
            if events & ~select.EPOLLOUT and fd in self._listeners:
                self._listeners[fd]()

    def _write(self, end: int) -> None:
        data, num_written = self._pending[end], 0
        try:
            while num_written < len(data):
                num_written += os.write(end, data[num_written : num_written + _PIECE])
        except BlockingIOError:
            del data[:num_written]
            self._update(end)
            return
        except OSError:  # the reader has closed it
            pass
        del self._pending[end]
        if end in self._closing:
            self.close(end)
        else:
            self._update(end)

    def _update(self, end: int) -> None:
        wanted = (select.EPOLLIN if end in self._listeners else 0) | (select.EPOLLOUT if end in self._pending else 0)
        registered = self._polled.get(end, 0)
        if wanted == registered:
            return
        if not wanted:
            self._poll.unregister(end)
            del self._polled[end]
            return
        if registered:
            self._poll.modify(end, wanted)
        else:
            self._poll.register(end, wanted)
        self._polled[end] = wanted
