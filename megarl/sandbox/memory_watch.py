"""How much memory a box uses, and how soon it could use too much: for machines that lend us no memory cgroup.

Summed over all processes below the box's first, which inherits every orphan: what is anonymous, shared or swapped out,
and page tables; and its files, which are memory, too. The filter of `seccomp.py` keeps boxes from memory that does not
show there. Sockets count with what they may buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal

_FASTEST = 2 << 30
"""Bytes that a core can fill in a second, and a little more."""
MIN_CHECK_S, _MAX_CHECK_S = 0.004, 0.1
_SOCKET = 212_992
"""Bytes that a socket may hold; the kernel's default, which no box can raise."""
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_KCMP_VM = 1
_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:")
_libc = ctypes.CDLL(None, use_errno=True)


def measure_memory(first: int, files: str | None) -> int:
    """Bytes of all processes from `first` downwards, and of the file system at `files`; at least what they use."""
    return sum(_resident(pid) for pid in list_descendants(first)) + _measure_files(first, files)


def measure_exact(first: int, files: str | None) -> int:
    """As `used`, where pages that several processes have count once. Slow."""
    pids: list[int] = []
    for pid in list_descendants(first):  # one that was vforked has its parent's memory, not a share in it
        if not any(_same_memory(pid, other) for other in pids):
            pids.append(pid)
    return sum(_proportional(pid) for pid in pids) + _measure_files(first, files)


def compute_check_delay(now: int, limit: int, cores: int) -> float:
    """Seconds until a box that uses `now` bytes could be at its limit."""
    return min(_MAX_CHECK_S, max(MIN_CHECK_S, (limit - now) / (_FASTEST * cores)))


def list_descendants(first: int) -> list[int]:
    """A process and all that descend from it, as long as they are."""
    found, i = [first], 0
    while i < len(found):
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{found[i]}/task"):
                found += map(int, _text(f"/proc/{found[i]}/task/{thread}/children").split())
        i += 1
    return found


def stop_processes(first: int) -> None:
    """Stop all processes from `first` downwards, and those that they fork meanwhile."""
    stopped: set[int] = set()
    while new := set(list_descendants(first)) - stopped:
        _signal(new, signal.SIGSTOP)
        stopped |= new


def resume_processes(first: int) -> None:
    """After `halt`."""
    _signal(set(list_descendants(first)), signal.SIGCONT)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _measure_files(first: int, files: str | None) -> int:
    if files is None:  # no box, whose files and sockets are its own
        return 0
    space = os.statvfs(files)
    total = (space.f_blocks - space.f_bfree) * space.f_frsize
    for line in _text(f"/proc/{first}/net/sockstat").splitlines():
        if line.startswith("sockets: used"):
            total += int(line.split()[2]) * _SOCKET
    return total


def _resident(pid: int) -> int:
    return _sum(f"/proc/{pid}/status", _COUNTED)


def _proportional(pid: int) -> int:
    """All pages but those of files on disk, shared ones in part."""
    return _sum(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")) or _resident(pid)


def _sum(path: str, names: tuple[str, ...]) -> int:
    total = 0
    for line in _text(path).splitlines():
        if line.startswith(names):
            total += int(line.split()[1]) << 10
    return total


def _same_memory(one: int, other: int) -> bool:
    return _KCMP is not None and _libc.syscall(_KCMP, one, other, _KCMP_VM, 0, 0) == 0


def _text(path: str) -> str:
    """Empty where the process has gone."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(1 << 20).decode()
    except OSError:
        return ""
