"""In-memory files shared between processes of one user: nameless, and opened through their creator's /proc.

Only the same user or root may open one, and a file disappears with its creator, however that ends.
"""

from __future__ import annotations

import os
import secrets


def create(name: str) -> int:
    """Create a file and return its descriptor. The file exists as long as the descriptor is open."""
    descriptor = os.memfd_create(f"{name}-{secrets.token_hex(8)}", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor


def build_path(descriptor: int) -> str:
    """Return the path by which another process of this user finds a file of this one: `NAME@/proc/PID/fd/NUMBER`."""
    proc_path = f"/proc/{os.getpid()}/fd/{descriptor}"
    return f"{os.readlink(proc_path)}@{proc_path}"


def resolve_path(path: str) -> str:
    """Return what to open. Raises FileNotFoundError if the creator has ended, as its pid may have been reused."""
    name, _, proc_path = path.rpartition("@")
    if os.readlink(proc_path) != name:
        raise FileNotFoundError(f"{proc_path} is not {name} any more")
    return proc_path


def append(path: str, data: bytes) -> None:
    """Append to the file with this path. Raises OSError if it is gone."""
    descriptor = os.open(resolve_path(path), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    with open(descriptor, "ab", buffering=0) as file:
        while data:
            data = data[file.write(data) :]
