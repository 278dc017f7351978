"""Host memory of a rank of `bench.py flow`, sampled while it works: bytes that its allocators have handed out, and its
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


def allocated_bytes() -> int:
    """Return the bytes that this process's allocators have handed out, in blocks and in separate mappings."""
    info = _libc.mallinfo2()
    return int(info.uordblks + info.hblkhd) + int(pa.total_allocated_bytes())


def shared_bytes() -> int:
    """Return this process's share of the bytes of memory that several processes have mapped, as far as it has touched
    them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            return int(line.split()[1]) << 10
    return 0


def used_bytes() -> int:
    return allocated_bytes() + shared_bytes()


class PeakSampler:
    """Samples the peak memory in each part, above the baseline. part: the current part of the main thread."""

    def __init__(self, baseline: int, part: Callable[[], str]) -> None:
        self.peaks: dict[str, int] = {}
        self._baseline, self._part, self._stopped = baseline, part, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(EVERY_S):
            part = self._part()
            self.peaks[part] = max(self.peaks.get(part, 0), used_bytes() - self._baseline)

    def stop(self) -> dict[str, int]:
        self._stopped.set()
        self._thread.join()
        return self.peaks


def settled_bytes() -> int:
    """Return the memory in use while nothing is running."""
    gc.collect()
    return used_bytes()
