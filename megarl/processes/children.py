"""Child processes: list them, end them with this process, and find connections of other users.

`die_with_parent` and `inherit_orphans` ask the kernel to end a process with its parent and to adopt grandchildren.
`list_connected_users` checks the ports of gloo and NCCL, which accept anybody.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

_LOOK_S = 0.02


def list_children() -> list[int]:
    """Return the pids of the children of all threads; in a process that inherits orphans, see `children.py`, of
    these, too.

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
    while left := [pid for pid in list_children() if pid not in spared]:
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


_ESTABLISHED = "01"


def list_connected_users() -> list[int]:
    """Numbers of the other users whose processes on this machine have a TCP connection with this one, ascending."""
    mine: set[tuple[str, str]] = set()
    users: dict[tuple[str, str], int] = {}
    sockets = _list_sockets()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, near, far, state, *_, user, _, inode = line.split()[:10]
                if inode in sockets and state == _ESTABLISHED:
                    mine.add((far, near))  # as the other end has it
                elif inode != "0":  # without a process any more, and then without a user
                    users[near, far] = int(user)
    return sorted({users[ends] for ends in mine & users.keys()} - {os.getuid()})


def _list_sockets() -> set[str]:
    """Inodes."""
    found = set()
    for link in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(link.path).removeprefix("socket:[").removesuffix("]"))
    return found
