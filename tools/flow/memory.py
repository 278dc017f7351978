"""What a rank of `bench_flow.py` holds on the host, looked at while it works: bytes that its allocators have given out,
and its share of memory that ranks have in common. What an allocator keeps of what was given back does not count."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

EVERY_S = 0.002
"""Seconds between two looks."""


class _Info(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Info


def given_out() -> int:
    """Bytes that this process has of its allocators, in blocks and in mappings of their own."""
    info = _libc.mallinfo2()
    return int(info.uordblks + info.hblkhd) + int(pa.total_allocated_bytes())


def in_common() -> int:
    """Bytes of memory that several processes have mapped, its share of those that it has touched."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            return int(line.split()[1]) << 10
    return 0


def held() -> int:
    return given_out() + in_common()


class Looking:
    """The most that was held within each part, above what there was before. part: what the main thread is at."""

    def __init__(self, before: int, part: Callable[[], str]) -> None:
        self.most: dict[str, int] = {}
        self._before, self._part, self._over = before, part, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            part = self._part()
            self.most[part] = max(self.most.get(part, 0), held() - self._before)

    def stop(self) -> dict[str, int]:
        self._over.set()
        self._thread.join()
        return self.most


def settled() -> int:
    """What is held when nothing is under way."""
    gc.collect()
    return held()
