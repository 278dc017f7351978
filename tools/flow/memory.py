"""Host memory of a rank of `bench_flow.py`, sampled while it works: bytes that its allocators have handed out, and its
share of shared memory. Freed memory that an allocator keeps does not count."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

EVERY_S = 0.002
"""Seconds between samples."""


class _Info(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Info


def given_out() -> int:
    """Return the bytes that this process's allocators have handed out, in blocks and in separate mappings."""
    info = _libc.mallinfo2()
    return int(info.uordblks + info.hblkhd) + int(pa.total_allocated_bytes())


def in_common() -> int:
    """Return this process's share of the bytes of memory that several processes have mapped, as far as it has touched
    them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            return int(line.split()[1]) << 10
    return 0


def used_bytes() -> int:
    return given_out() + in_common()


class PeakSampler:
    """Samples the peak memory in each part, above the level before. part: the current part of the main thread."""

    def __init__(self, before: int, part: Callable[[], str]) -> None:
        self.most: dict[str, int] = {}
        self._before, self._part, self._over = before, part, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            part = self._part()
            self.most[part] = max(self.most.get(part, 0), used_bytes() - self._before)

    def stop(self) -> dict[str, int]:
        self._over.set()
        self._thread.join()
        return self.most


def settled_bytes() -> int:
    """Return the memory in use while nothing is running."""
    gc.collect()
    return used_bytes()
