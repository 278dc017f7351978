"""Child processes: list them, end them with this process, and find connections of other users.

`die_with_parent` and `inherit_orphans` ask the kernel to end a process with its parent and to adopt grandchildren.
`list_connected_users` checks the ports of gloo and NCCL, which accept connections from anybody.
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
    """Return the pids of the children of all threads, including adopted orphans after `inherit_orphans`.

    When a thread ends, the kernel moves its children to another thread, which may have been read already. The listing
    is therefore repeated until no thread has ended during it.
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
    """Wait until all children have ended except the spared ones; kill them after `patience_s` seconds.

    Includes orphaned descendants, which this process adopts. Returns the pids that had to be killed. Reaps children, so
    no other code may wait for them.
    """
    deadline, killed = time.monotonic() + patience_s, list[int]()
    while pending := [pid for pid in list_children() if pid not in spared]:
        for pid in pending:
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
    """Return whether a signal stopped the process (state `T`); a debugger's stop is `t` and does not count."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def is_tracker(pid: int) -> bool:
    """Return whether a process is one of Python's resource trackers.

    A tracker exits by itself after the processes that it serves, and only then removes the semaphores that they left in
    shared memory.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return b"resource_tracker" in command.read()
    except OSError:
        return False


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies, or the parent's thread that started it.

    parent: its pid; if it is already gone, this process exits at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def inherit_orphans() -> None:
    """Adopt all orphaned descendants (subreaper)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


_ESTABLISHED = "01"


def list_connected_users() -> list[int]:
    """Return the other users whose processes on this machine have a TCP connection with this process.

    The result is sorted numeric user ids.
    """
    connections: set[tuple[str, str]] = set()
    users: dict[tuple[str, str], int] = {}
    sockets = _list_sockets()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local_end, remote_end, state, *_, user, _, inode = line.split()[:10]
                if inode in sockets and state == _ESTABLISHED:
                    connections.add((remote_end, local_end))  # as the peer sees it
                elif inode != "0":  # inode 0: the socket has no process and hence no user
                    users[local_end, remote_end] = int(user)
    return sorted({users[ends] for ends in connections & users.keys()} - {os.getuid()})


def _list_sockets() -> set[str]:
    """Return the inodes of this process's sockets."""
    inodes = set()
    for link in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link.path).removeprefix("socket:[").removesuffix("]"))
    return inodes
