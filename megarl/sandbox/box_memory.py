"""Memory limit of a box: a memory cgroup below our own where this machine delegates some, else a watchdog.

The watchdog sums up the memory of all descendants of the box's first process, which adopts every orphan, the box's
files, and its sockets with their maximum buffers. `seccomp.py` denies boxes memory that would not be counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import signal
import time
from collections.abc import Iterable, Iterator

from megarl.processes.children import ignore_signals

_NAME = "megarl-sandbox-"


class Cgroups:
    """Cgroups of one process that starts boxes. If it starts as root, create this while it still is."""

    def __init__(self, folder: str, version: int) -> None:
        self._folder, self._version = folder, version
        self._limit_file = "memory.max" if version == 2 else "memory.limit_in_bytes"
        self._pending_removal: set[str] = set()
        self._count = 0

    @classmethod
    def find(cls) -> Cgroups | None:
        """Create cgroups and move this process into one of them. Returns None if it may not."""
        for folder, version in _iter_candidates():
            cgroups = cls(f"{folder}/{_NAME}{os.getpid()}", version)
            if cgroups._set_up():
                return cgroups
        return None

    def transfer_ownership(self, user: int) -> None:
        """Give the cgroups to the user that this process is about to become."""
        for name in ("", "/cgroup.procs", "/tasks"):
            with contextlib.suppress(FileNotFoundError):
                os.chown(self._folder + name, user, user)

    def join(self, pid: int, limit: int) -> str:
        """Put a process and its descendants into a new cgroup with a limit in bytes."""
        group = self._create_group()
        _write(f"{group}/{self._limit_file}", str(limit))
        if self._version == 1:
            with contextlib.suppress(OSError):
                _write(f"{group}/memory.memsw.limit_in_bytes", str(limit))
        _write(f"{group}/cgroup.procs", str(pid))
        return group

    def remove_group(self, group: str) -> bool:
        """Remove a cgroup whose processes have ended. Returns whether one was killed for its memory."""
        events = _text(f"{group}/{'memory.events' if self._version == 2 else 'memory.oom_control'}").splitlines()
        num_kills = next((int(line.split()[1]) for line in events if line.startswith("oom_kill ")), 0)
        self._pending_removal.add(group)
        # A group whose last process is still exiting is removed after the next box.
        for old in tuple(self._pending_removal):
            with contextlib.suppress(OSError):
                os.rmdir(old)
                self._pending_removal.remove(old)
        return num_kills > 0

    def _create_group(self) -> str:
        self._count += 1
        group = f"{self._folder}/{self._count}"
        os.mkdir(group)
        if self._version == 2:
            for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
                with contextlib.suppress(OSError):
                    _write(f"{group}/{name}", value)
        return group

    def _set_up(self) -> bool:
        try:
            os.mkdir(self._folder)
        except OSError:
            return False
        try:
            if self._version == 2:  # v2 allows no processes next to child groups
                _write(f"{self._create_group()}/cgroup.procs", str(os.getpid()))
                _write(f"{self._folder}/cgroup.subtree_control", "+memory")
            probe = self._create_group()
            _write(f"{probe}/{self._limit_file}", str(64 << 20))
            os.rmdir(probe)
        except OSError:
            with contextlib.suppress(OSError):
                _write(f"{os.path.dirname(self._folder)}/cgroup.procs", str(os.getpid()))
            _remove(self._folder)
            return False
        self._fork_cleaner()
        return True

    def _fork_cleaner(self) -> None:
        """Fork a process that removes these cgroups after this one, which may then lack the right to, has ended."""
        runner_pid = os.getpid()
        if os.fork():
            return
        try:
            ignore_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            pidfd = os.pidfd_open(runner_pid)
            os.closerange(0, pidfd)
            os.closerange(pidfd + 1, 4096)
            if self._version == 2:
                _write(f"{os.path.dirname(self._folder)}/cgroup.procs", str(os.getpid()))
            select.select([pidfd], [], [])
            for _ in range(200):  # the last boxes may still be exiting
                if _remove(self._folder):
                    break
                time.sleep(0.05)
        finally:
            os._exit(0)


def _iter_candidates() -> Iterator[tuple[str, int]]:
    """Iterate over (folder, cgroup version) where a memory cgroup may be created, the nearest first.

    Removes cgroups of ours there whose owner and cleaner were both killed.
    """
    for line in _text("/proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        version = 2 if kinds == "" else 1
        root = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/memory"
        needed = "cgroup.controllers" if version == 2 else "memory.limit_in_bytes"
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = "/".join([root, *parts[:depth]])
            if depth < len(parts) and (version == 1 or os.geteuid() == 0):
                break
            if os.path.exists(f"{folder}/{needed}") and os.access(folder, os.W_OK):
                for name in os.listdir(folder):
                    pid = name.removeprefix(_NAME)
                    if name.startswith(_NAME) and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
                        _remove(f"{folder}/{name}")
                yield folder, version


def _remove(folder: str) -> bool:
    """Remove a cgroup with its children. Returns whether it no longer exists."""
    with contextlib.suppress(OSError):
        for below, _, _ in os.walk(folder, topdown=False):
            os.rmdir(below)
    return not os.path.exists(folder)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


_FASTEST = 2 << 30
"""Upper bound of the bytes that a core can fill per second."""
MIN_CHECK_S, _MAX_CHECK_S = 0.004, 0.1
_SOCKET = 212_992
"""Maximum bytes buffered by a socket: the kernel's default, which no box can raise."""
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_KCMP_VM = 1
_libc = ctypes.CDLL(None, use_errno=True)


def measure_memory(root_pid: int, files_path: str | None) -> int:
    """Return an upper bound of the bytes used by `root_pid`, its descendants, and the file system at `files_path`."""
    return sum(_resident(pid) for pid in list_descendants(root_pid)) + _measure_files(root_pid, files_path)


def measure_exact(root_pid: int, files_path: str | None) -> int:
    """As `measure_memory`, but count pages that several processes share once. Slow."""
    total = _measure_files(root_pid, files_path)
    pids: list[int] = []
    for pid in list_descendants(root_pid):
        # A vforked process uses its parent's memory itself.
        if _KCMP is None or all(_libc.syscall(_KCMP, pid, other, _KCMP_VM, 0, 0) != 0 for other in pids):
            pids.append(pid)
            total += _sum(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")) or _resident(pid)
    return total


def compute_check_delay(used_bytes: int, limit: int) -> float:
    """Return the seconds until a box that uses `used_bytes` bytes could reach its limit."""
    return min(_MAX_CHECK_S, max(MIN_CHECK_S, (limit - used_bytes) / (_FASTEST * (os.cpu_count() or 1))))


def list_descendants(root_pid: int) -> list[int]:
    """Return a process and its live descendants."""
    pids, i = [root_pid], 0
    while i < len(pids):
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pids[i]}/task"):
                pids += map(int, _text(f"/proc/{pids[i]}/task/{thread}/children").split())
        i += 1
    return pids


def stop_processes(root_pid: int) -> None:
    """Stop `root_pid` and its descendants, including those that they fork meanwhile."""
    stopped: set[int] = set()
    while new := set(list_descendants(root_pid)) - stopped:
        signal_processes(new, signal.SIGSTOP)
        stopped |= new


def signal_processes(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _measure_files(root_pid: int, files_path: str | None) -> int:
    if files_path is None:  # without isolation, files and sockets are not the box's own
        return 0
    space = os.statvfs(files_path)
    total = (space.f_blocks - space.f_bfree) * space.f_frsize
    for line in _text(f"/proc/{root_pid}/net/sockstat").splitlines():
        if line.startswith("sockets: used"):
            total += int(line.split()[2]) * _SOCKET
    return total


def _resident(pid: int) -> int:
    return _sum(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:"))


def _sum(path: str, names: tuple[str, ...]) -> int:
    return sum(int(line.split()[1]) << 10 for line in _text(path).splitlines() if line.startswith(names))


def _text(path: str) -> str:
    """Return a file's text; empty if the process has ended."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(1 << 20).decode()
    except OSError:
        return ""
