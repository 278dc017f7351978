"""What this process has started, and what that has left behind: found, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

_LOOK_S = 0.02


def children() -> list[int]:
    """Return the pids of the children of all threads; in a process that inherits orphans, see `parent.py`, of these, too.

    The kernel hands the children of a thread that ends to another one, which may have been read by then: the listing is
    read again until no thread has ended meanwhile.
    """
    while True:
        pids: list[int] = []
        threads = os.listdir("/proc/self/task")
        for thread in threads:
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as listing:
                pids += map(int, listing.read().split())
        if set(threads) <= set(os.listdir("/proc/self/task")):
            return pids


def end_orphans(spared: Collection[int], patience_s: float) -> list[int]:
    """Wait until no child is left but the spared ones, and theirs have come here and ended, too; after `patience_s`
    seconds kill them. Returns the pids of those that had to be killed. Children are reaped: none may be waited for
    elsewhere."""
    deadline, killed = time.monotonic() + patience_s, list[int]()
    while left := [pid for pid in children() if pid not in spared]:
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    continue
            if time.monotonic() > deadline and pid not in killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        time.sleep(_LOOK_S)
    return killed


def is_stopped(pid: int) -> bool:
    """By a signal, not by a debugger, which is `t`."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def is_tracker(pid: int) -> bool:
    """Whether it is a resource tracker of Python's, which ends by itself after those that it works for, and only then
    removes the semaphores that these have left in shared memory."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return b"resource_tracker" in command.read()
    except OSError:
        return False
