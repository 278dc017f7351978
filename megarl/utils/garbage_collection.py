"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_pauses = 0
_was_enabled = False


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disable garbage collection in the whole process. Pauses of several threads may overlap: the last one to end
    restores the state from before the first."""
    global _num_pauses, _was_enabled
    with _lock:
        if not _num_pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_pauses += 1
    try:
        yield
    finally:
        with _lock:
            _num_pauses -= 1
            if not _num_pauses and _was_enabled:
                gc.enable()
