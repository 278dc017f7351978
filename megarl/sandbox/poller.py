"""Event loop for file descriptors of pipes and sockets. Only `Poller.wait` blocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector

_PIECE = 1 << 16


class Poller:
    """Waits for all descriptors that have a listener or unsent data."""

    def __init__(self) -> None:
        self._selector = DefaultSelector()
        self._listeners: dict[int, Callable[[], None]] = {}
        self._pending: dict[int, bytearray] = {}
        self._closing: set[int] = set()

    def listen(self, fd: int, listener: Callable[[], None]) -> None:
        """Call the listener whenever there is something to read, or the other end has closed."""
        os.set_blocking(fd, False)
        self._listeners[fd] = listener
        self._update(fd)

    def send(self, fd: int, data: bytes, close_after: bool = False) -> None:
        """Write as the other end accepts it. With `close_after`, close the descriptor after this data."""
        if close_after:
            self._closing.add(fd)
        os.set_blocking(fd, False)
        self._pending.setdefault(fd, bytearray()).extend(data)
        self._write(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor and discard its unsent data."""
        self._listeners.pop(fd, None)
        self._pending.pop(fd, None)
        self._closing.discard(fd)
        self._update(fd)
        os.close(fd)

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for events and call the listeners."""
        for key, events in self._selector.select(max(0.0, seconds)):
            if events & EVENT_WRITE and key.fd in self._pending:
                self._write(key.fd)
            if events & EVENT_READ and key.fd in self._listeners:
                self._listeners[key.fd]()

    def _write(self, fd: int) -> None:
        data, num_written = self._pending[fd], 0
        try:
            while num_written < len(data):
                num_written += os.write(fd, data[num_written : num_written + _PIECE])
        except BlockingIOError:
            del data[:num_written]
            self._update(fd)
            return
        except OSError:  # the reader has closed it
            pass
        del self._pending[fd]
        if fd in self._closing:
            self.close(fd)
        else:
            self._update(fd)

    def _update(self, fd: int) -> None:
        events = (EVENT_READ if fd in self._listeners else 0) | (EVENT_WRITE if fd in self._pending else 0)
        if fd not in self._selector.get_map():
            if events:
                self._selector.register(fd, events)
        elif events:
            self._selector.modify(fd, events)
        else:
            self._selector.unregister(fd)
