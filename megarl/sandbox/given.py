"""Files that go into a box, and those that come out of it: none may lie, or point, outside."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST_COMMAND = 100_000
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def checked(name: str) -> str:
    """A path within the working directory. Raises ValueError."""
    parts = name.split("/")
    if (
        not name
        or "\0" in name
        or any(part in ("", ".", "..") for part in parts)
        or len(name) > 1000
        or len(parts) > 32
    ):
        raise ValueError(f"{name[:80]!r} is no path within a box: a/b.txt is, and no . or .. or empty part")
    return name


def spoken(command: Sequence[str]) -> list[str]:
    """A command that the kernel takes. Raises ValueError."""
    if not command or any("\0" in part for part in command):
        raise ValueError("a command has a first part, and no zero character in any; give code in a file")
    if sum(len(os.fsencode(part)) for part in command) > _LONGEST_COMMAND:
        raise ValueError(f"a command has at most {_LONGEST_COMMAND} bytes; give code in a file")
    return list(command)


def put(folder: str, name: str, content: bytes) -> None:
    """Write a file before anything runs there."""
    path = f"{folder}/{checked(name)}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(file, "wb") as opened:
        opened.write(content)


def take(folder: str, names: Sequence[str], most: int) -> dict[str, bytes]:
    """Those of the files that there are, when nothing runs there any more: regular ones without other names, reached
    without a link; together at most so many bytes."""
    found: dict[str, bytes] = {}
    for name in names:
        with contextlib.suppress(OSError):
            content = _read(folder, name, most)
            if content is not None:
                most -= len(content)
                found[name] = content
    return found


def _read(folder: str, name: str, most: int) -> bytes | None:
    *above, last = checked(name).split("/")
    at = os.open(folder, _FOLDER)
    try:
        for part in above:
            below = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at = below
        file = os.open(last, _FILE, dir_fd=at)
        with open(file, "rb") as opened:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1 or about.st_size > most:
                return None
            return opened.read(most)
    finally:
        os.close(at)
