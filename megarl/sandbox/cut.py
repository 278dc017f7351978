"""Output that is kept in part: its head and its tail, however much there is."""

from __future__ import annotations


class Cut:
    """At most `most` bytes of what is added, and a mark where some are left out."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[max(0, room) :]
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    def value(self) -> bytes:
        gone = self.total - len(self._head) - self._half
        if gone <= 0:
            return bytes(self._head + self._tail)
        return bytes(self._head) + b"\n... %d bytes left out ...\n" % gone + bytes(self._tail[-self._half :])
