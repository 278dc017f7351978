"""Memory cgroups for boxes, where this machine lends us some: the kernel itself then keeps a box to its memory.

They are made below our own cgroup, so that what a batch system or a container gave us still holds for all of it; of
version 2 also beside it, where the folder above belongs to our own user. Most machines lend none, and then
`memory_watch.py` stands in.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator

_NAME = "megarl-sandbox-"
_CLEANING_TRIES = 200


class Cgroups:
    """Of one process that starts boxes. Made while it is still root, if it is."""

    def __init__(self, folder: str, version: int) -> None:
        self._folder, self._version = folder, version
        self._pending_removal: set[str] = set()
        self._made = 0

    @classmethod
    def find(cls) -> Cgroups | None:
        """Those that this process may make; it moves into one of them. None where there are none."""
        for folder, version in _iter_candidates():
            found = cls(f"{folder}/{_NAME}{os.getpid()}", version)
            if found._set_up():
                return found
        return None

    def transfer_ownership(self, user: int) -> None:
        """To who this process is about to become."""
        for name in ("", "/cgroup.procs", "/tasks"):
            with contextlib.suppress(FileNotFoundError):
                os.chown(self._folder + name, user, user)

    def join(self, pid: int, limit: int) -> str:
        """Put a process, and all that it will start, in a cgroup with so many bytes."""
        group = self._create_group()
        if self._version == 2:
            _write(f"{group}/memory.max", str(limit))
        else:
            _write(f"{group}/memory.limit_in_bytes", str(limit))
            with contextlib.suppress(OSError):
                _write(f"{group}/memory.memsw.limit_in_bytes", str(limit))
        _write(f"{group}/cgroup.procs", str(pid))
        return group

    def remove_group(self, group: str) -> bool:
        """When all in it have ended: whether one was killed for its memory."""
        full = self._count_oom_kills(group) > 0
        self._pending_removal.add(group)
        for old in tuple(
            self._pending_removal
        ):  # one whose last process is not quite gone is removed after the next box
            with contextlib.suppress(OSError):
                os.rmdir(old)
                self._pending_removal.remove(old)
        return full

    def _create_group(self) -> str:
        self._made += 1
        group = f"{self._folder}/{self._made}"
        os.mkdir(group)
        if self._version == 2:
            with contextlib.suppress(OSError):
                _write(f"{group}/memory.swap.max", "0")
            with contextlib.suppress(OSError):
                _write(f"{group}/memory.oom.group", "1")
        return group

    def _count_oom_kills(self, group: str) -> int:
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError), open(f"{group}/{name}") as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def _set_up(self) -> bool:
        try:
            os.mkdir(self._folder)
        except OSError:
            return False
        try:
            if self._version == 2:  # which has no processes beside groups
                _write(f"{self._create_group()}/cgroup.procs", str(os.getpid()))
                _write(f"{self._folder}/cgroup.subtree_control", "+memory")
            probe = self._create_group()
            _write(f"{probe}/memory.{'max' if self._version == 2 else 'limit_in_bytes'}", str(64 << 20))
            os.rmdir(probe)
        except OSError:
            with contextlib.suppress(OSError):
                _write(f"{os.path.dirname(self._folder)}/cgroup.procs", str(os.getpid()))
            _remove(self._folder)
            return False
        self._fork_cleaner()
        return True

    def _fork_cleaner(self) -> None:
        """A process that does nothing but remove these cgroups when this one, which may no longer do it, has ended."""
        own = os.getpid()
        if os.fork():
            return
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            handle = os.pidfd_open(own)
            os.closerange(0, handle)
            os.closerange(handle + 1, 4096)
            if self._version == 2:
                _write(f"{os.path.dirname(self._folder)}/cgroup.procs", str(os.getpid()))
            wait = select.poll()
            wait.register(handle, select.POLLIN)
            wait.poll()
            for _ in range(_CLEANING_TRIES):  # the last boxes may still be ending
                if _remove(self._folder):
                    break
                time.sleep(0.05)
        finally:
            os._exit(0)


def _iter_candidates() -> Iterator[tuple[str, int]]:
    """Folders in which a cgroup for memory might be made, the nearest first; old ones of ours are removed there."""
    with open("/proc/self/cgroup") as file:
        rows = [line.rstrip("\n").split(":", 2) for line in file]
    for _, kinds, path in rows:
        if kinds in ("", "memory"):
            version = 2 if kinds == "" else 1
            root = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/memory"
            needed = "cgroup.controllers" if version == 2 else "memory.limit_in_bytes"
            parts = [part for part in path.split("/") if part and part != ".."]
            for depth in range(len(parts), -1, -1):
                folder = "/".join([root, *parts[:depth]])
                if depth < len(parts) and (version == 1 or os.geteuid() == 0):
                    break
                if os.path.exists(f"{folder}/{needed}") and os.access(folder, os.W_OK):
                    _remove_stale(folder)
                    yield folder, version


def _remove_stale(folder: str) -> None:
    """What is left of those whose cleaner was killed, too."""
    for name in os.listdir(folder):
        number = name.removeprefix(_NAME)
        if name.startswith(_NAME) and number.isdecimal() and not os.path.exists(f"/proc/{number}"):
            _remove(f"{folder}/{name}")


def _remove(folder: str) -> bool:
    """With those in it; whether that is done."""
    with contextlib.suppress(OSError):
        for below, _, _ in os.walk(folder, topdown=False):
            os.rmdir(below)
    return not os.path.exists(folder)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
