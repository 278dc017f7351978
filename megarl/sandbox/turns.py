"""So many boxes at once on a machine: locks on the bytes of a file, which the kernel takes back from who has died."""

from __future__ import annotations

import fcntl
import os
import struct


class Turns:
    """Of all processes that have the same file open."""

    def __init__(self, path: str, count: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._free = set(range(count))
        self._last = os.getpid() % count  # not all begin at the same
        self._count = count

    def take(self) -> int | None:
        """A turn, to be given back; None where all are taken."""
        for i in range(self._count):
            number = (self._last + i) % self._count
            if number in self._free and self._lock(number, fcntl.F_WRLCK):
                self._free.remove(number)
                self._last = number
                return number
        return None

    def give_back(self, number: int) -> None:
        self._lock(number, fcntl.F_UNLCK)
        self._free.add(number)

    def _lock(self, number: int, kind: int) -> bool:
        """Of the open file, not of the process: two of one process stand in each other's way as well."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0))
        except OSError:
            return False
        return True
