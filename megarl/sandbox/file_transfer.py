"""Copy files into and out of a box. No path may lie or point outside."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_COMMAND_BYTES = 100_000
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def check_path(name: str) -> str:
    """Return the path if it is within the working directory. Raises ValueError."""
    parts = name.split("/")
    if "\0" in name or {"", ".", ".."} & set(parts) or len(name) > 1000 or len(parts) > 32:
        raise ValueError(f"{name[:80]!r} is not a path inside the sandbox: a/b.txt is, and no . or .. or empty part")
    return name


def check_command(command: Sequence[str]) -> list[str]:
    """Return the command as a list if the kernel accepts it. Raises ValueError."""
    if not command or any("\0" in part for part in command):
        raise ValueError("a command has a first part, and no zero character in any; give code in a file")
    if sum(len(os.fsencode(part)) for part in command) > _MAX_COMMAND_BYTES:
        raise ValueError(f"a command has at most {_MAX_COMMAND_BYTES} bytes; give code in a file")
    return list(command)


def write_file(folder: str, name: str, content: bytes) -> None:
    """Write a file, before anything runs in the box."""
    path = f"{folder}/{check_path(name)}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(file, "wb") as opened:
        opened.write(content)


class FetchRefused(Exception):
    """A file may not be fetched; the message says why."""


def fetch_files(folder: str, names: Sequence[str], max_bytes: int) -> tuple[dict[str, bytes], dict[str, str]]:
    """Read files from a box in which nothing runs any more. Returns contents, and the reasons of refusals.

    A file must be regular, without hard links or holes, and reachable without a symbolic link. All files together have
    at most `max_bytes` bytes. A sparse file would be larger outside than what the box was charged for.
    """
    contents: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            contents[name] = _read(folder, name, max_bytes)
            max_bytes -= len(contents[name])
        except FetchRefused as error:
            refused[name] = str(error)
        except FileNotFoundError:
            pass
        except OSError as error:
            refused[name] = f"cannot be opened without following a link: {error.strerror}"
    return contents, refused


def _read(folder: str, name: str, max_bytes: int) -> bytes:
    *parents, file_name = check_path(name).split("/")
    folder_fd = os.open(folder, _FOLDER)
    try:
        for part in parents:
            subfolder_fd = os.open(part, _FOLDER, dir_fd=folder_fd)
            os.close(folder_fd)
            folder_fd = subfolder_fd
        file = os.open(file_name, _FILE, dir_fd=folder_fd)
        with open(file, "rb") as opened:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode):
                raise FetchRefused("is not a regular file")
            if info.st_nlink != 1:
                raise FetchRefused("has another name (a hard link)")
            if info.st_size > max_bytes:
                raise FetchRefused(
                    f"has {info.st_size} bytes, and {max_bytes} may still be fetched (16 x output_bytes in all)"
                )
            if info.st_size and os.lseek(file, 0, os.SEEK_HOLE) < info.st_size:
                raise FetchRefused(f"is sparse: its {info.st_size} bytes have holes; write them out")
            os.lseek(file, 0, os.SEEK_SET)
            return opened.read(max_bytes)
    finally:
        os.close(folder_fd)
