"""Other users of this machine who are connected to a process: gloo's and NCCL's ports take in whoever comes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_ESTABLISHED = "01"


def connected_users() -> list[int]:
    """Numbers of the other users whose processes on this machine have a TCP connection with this one, ascending."""
    mine: set[tuple[str, str]] = set()
    users: dict[tuple[str, str], int] = {}
    sockets = _own_sockets()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, near, far, state, *_, user, _, inode = line.split()[:10]
                if inode in sockets and state == _ESTABLISHED:
                    mine.add((far, near))  # as the other end has it
                elif inode != "0":  # without a process any more, and then without a user
                    users[near, far] = int(user)
    return sorted({users[ends] for ends in mine & users.keys()} - {os.getuid()})


def _own_sockets() -> set[str]:
    """Inodes."""
    found = set()
    for link in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(link.path).removeprefix("socket:[").removesuffix("]"))
    return found
