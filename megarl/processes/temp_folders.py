"""Temporary folders that live as long as processes need them, and removal of stale ones.

The owner of a folder holds a lock on it, which forked processes inherit and the kernel releases when the last of them
has ended. The next program of the same user that creates a folder with the same prefix removes the unlocked ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from types import TracebackType

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_PATH_CHARS = 50
"""Maximum length of the temporary folder's path: a socket path in it must fit into 107 bytes."""
_MIN_AGE_S = 60.0
"""Minimum age of a stale folder: a new one may not be locked yet."""


def remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


class TempFolder:
    """A new folder that only this user may enter.

    lock: its descriptor, for a process that must keep it, too. clear: removes a folder, also a stale one of another
    program.
    """

    def __init__(self, prefix: str, clear: Callable[[str], None] = remove) -> None:
        self._clear = clear
        parent = tempfile.gettempdir()
        parent = parent if len(parent) < _MAX_PATH_CHARS else "/tmp"
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for path in [entry.path for entry in entries if entry.name.startswith(prefix)]:
                if is_stale(path, _MIN_AGE_S):
                    clear(path)
        self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        self.lock = os.open(self.path, _FOLDER)
        fcntl.flock(self.lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Remove the folder, even if other processes hold its lock. Safe to call twice."""
        if self.lock >= 0:
            self._clear(self.path)
            os.close(self.lock)
            self.lock = -1

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def is_stale(path: str, min_age_s: float) -> bool:
    """Return whether a folder is this user's, unchanged for `min_age_s` seconds, and no process has locked it."""
    try:
        folder = os.open(path, _FOLDER)
    except OSError:
        return False
    try:
        info = os.fstat(folder)
        is_private = info.st_uid == os.geteuid() and info.st_mode & 0o777 == 0o700
        if not is_private or time.time() - info.st_ctime < min_age_s:
            return False
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(folder)
