"""Files in memory for the processes of one user: without a name in any file system, opened through their maker's /proc.

The kernel lets only who may look into the maker open one: the same user, or root. There is nothing to clean up: it goes
with its maker, however that ends.
"""

from __future__ import annotations

import os
import secrets


def create(name: str) -> int:
    """The descriptor of a new file, open for as long as the file is to be there."""
    descriptor = os.memfd_create(f"{name}-{secrets.token_hex(8)}", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor


def build_path(descriptor: int) -> str:
    """By what another process of this user opens a file of this process: `/proc/PID/fd/NUMBER`, behind what it is
    called, by which `place` knows it."""
    where = f"/proc/{os.getpid()}/fd/{descriptor}"
    return f"{os.readlink(where)}@{where}"


def resolve_path(found: str) -> str:
    """The part of a `path` that is opened. Raises FileNotFoundError where the maker has ended: its pid may be another's
    by now."""
    name, _, where = found.rpartition("@")
    if os.readlink(where) != name:
        raise FileNotFoundError(f"{where} is not {name} any more")
    return where


def append(found: str, content: bytes) -> None:
    """Write at the end of the file with this `path`, in one piece. Raises OSError where it is gone."""
    descriptor = os.open(resolve_path(found), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        while content:
            content = content[os.write(descriptor, content) :]
    finally:
        os.close(descriptor)
