"""Folders in the temporary folder, for as long as processes need them, and the removal of those that were left behind.

Whoever needs such a folder holds a lock on it, which is inherited by what it forks, and which the kernel takes back
when the last of them is gone, however they ended. So a folder that nobody holds is removed by the next program of the
same user that makes one with the same prefix.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from types import TracebackType

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_PATH_CHARS = 50
"""Characters of the temporary folder: the name of a socket in it has at most 107 bytes."""
_MIN_AGE_S = 60.0
"""A folder that was made just now may not be locked yet."""


def remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


class TempFolder:
    """A new folder that only this user may enter. lock: its descriptor, for a process that is to hold it, too.

    clear: removes such a folder, also one that another program has left behind.
    """

    def __init__(self, prefix: str, clear: Callable[[str], None] = remove) -> None:
        self._clear = clear
        place = tempfile.gettempdir()
        place = place if len(place) < _MAX_PATH_CHARS else "/tmp"
        for path in _list_stale(place, prefix):
            clear(path)
        self.path = tempfile.mkdtemp(prefix=prefix, dir=place)
        self.lock = os.open(self.path, _FOLDER)
        fcntl.flock(self.lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Remove it, whoever else holds it; safe to call twice."""
        if self.lock >= 0:
            self._clear(self.path)
            os.close(self.lock)
            self.lock = -1

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def _list_stale(place: str, prefix: str) -> list[str]:
    """Folders of this user with this prefix that no process holds."""
    found: list[str] = []
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(prefix)]
    return [path for path in found if _is_stale(path)]


def _is_stale(path: str) -> bool:
    try:
        folder = os.open(path, _FOLDER)
    except OSError:
        return False
    try:
        about = os.fstat(folder)
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) != 0o700:
            return False
        if time.time() - about.st_ctime < _MIN_AGE_S:
            return False
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(folder)
