"""This machine in a run: its name in messages, and other users who are connected to this process.

gloo and NCCL accept connections from anybody; `list_connected_users` finds those who did connect.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def get_name(number: int | None = None) -> str:
    """Return Slurm's name of the node, or else the host name, with the node's number if there are several."""
    if slurm_name := os.environ.get("SLURMD_NODENAME"):
        return slurm_name
    if number is None and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # torchrun's
        number = int(os.environ["GROUP_RANK"])
    return socket.gethostname() + ("" if number is None else f" (number {number})")


_ESTABLISHED = "01"


def list_connected_users() -> list[int]:
    """Return the ids of other users whose processes on this machine have a TCP connection with this process."""
    sockets = set()  # inodes of this process's sockets
    for link in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(link.path).removeprefix("socket:[").removesuffix("]"))
    connections: set[tuple[str, str]] = set()
    users: dict[tuple[str, str], int] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local_end, remote_end, state, *_, user, _, inode = line.split()[:10]
                if inode in sockets and state == _ESTABLISHED:
                    connections.add((remote_end, local_end))  # as the peer sees it
                elif inode != "0":  # inode 0: the socket has no process and hence no user
                    users[local_end, remote_end] = int(user)
    return sorted({users[connection] for connection in connections & users.keys()} - {os.getuid()})
