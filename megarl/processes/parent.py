"""Who ends with whom: what a process asks of the kernel about its parent and its grandchildren."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, of: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies, or the parent's thread that started it.

    parent: its pid; if it is already gone, this process exits at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, of, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def inherit_orphans() -> None:
    """Become the parent of whatever its descendants leave behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
