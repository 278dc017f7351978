"""Memory usage of a box, and the earliest time that it could exceed its limit, for machines without a memory cgroup.

Sums over all descendants of the box's first process, which adopts every orphan: anonymous, shared, and swapped-out
memory and page tables; plus the box's files, which are in memory, too. The filter of `seccomp.py` denies boxes memory
that would not be counted. Sockets count with their maximum buffers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal

_FASTEST = 2 << 30
"""Upper bound of the bytes that a core can fill per second."""
MIN_CHECK_S, _MAX_CHECK_S = 0.004, 0.1
_SOCKET = 212_992
"""Maximum bytes buffered by a socket: the kernel's default, which no box can raise."""
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_KCMP_VM = 1
_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:")
_libc = ctypes.CDLL(None, use_errno=True)


def measure_memory(root_pid: int, files_path: str | None) -> int:
    """Return an upper bound of the bytes used by `root_pid`, its descendants, and the file system at `files_path`."""
    return sum(_resident(pid) for pid in list_descendants(root_pid)) + _measure_files(root_pid, files_path)


def measure_exact(root_pid: int, files_path: str | None) -> int:
    """As `measure_memory`, but count shared pages once. Slow."""
    pids: list[int] = []
    for pid in list_descendants(root_pid):  # a vforked process uses its parent's memory itself
        if not any(_same_memory(pid, other) for other in pids):
            pids.append(pid)
    return sum(_proportional(pid) for pid in pids) + _measure_files(root_pid, files_path)


def compute_check_delay(used_bytes: int, limit: int, cores: int) -> float:
    """Return the seconds until a box that uses `used_bytes` bytes could reach its limit."""
    return min(_MAX_CHECK_S, max(MIN_CHECK_S, (limit - used_bytes) / (_FASTEST * cores)))


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
        _signal(new, signal.SIGSTOP)
        stopped |= new


def resume_processes(root_pid: int) -> None:
    """Undo `stop_processes`."""
    _signal(set(list_descendants(root_pid)), signal.SIGCONT)


def _signal(pids: set[int], number: signal.Signals) -> None:
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
    return _sum(f"/proc/{pid}/status", _COUNTED)


def _proportional(pid: int) -> int:
    """Return the bytes of all pages except those of files on disk, with shared pages divided among their processes."""
    return _sum(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")) or _resident(pid)


def _sum(path: str, names: tuple[str, ...]) -> int:
    total = 0
    for line in _text(path).splitlines():
        if line.startswith(names):
            total += int(line.split()[1]) << 10
    return total


def _same_memory(pid: int, other_pid: int) -> bool:
    return _KCMP is not None and _libc.syscall(_KCMP, pid, other_pid, _KCMP_VM, 0, 0) == 0


def _text(path: str) -> str:
    """Return a file's text; empty if the process has ended."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(1 << 20).decode()
    except OSError:
        return ""
