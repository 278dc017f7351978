"""Child processes: list them, end them with this process, and limit those that run user code.

`die_with_parent` and `inherit_orphans` ask the kernel to end a process with its parent and to adopt grandchildren.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_LOOK_S = 0.02


def list_children() -> list[int]:
    """Return the pids of the children of all threads, including adopted orphans after `inherit_orphans`."""
    # When a thread ends, its children move to another thread, which may have been read already: read again.
    while True:
        pids: list[int] = []
        threads = os.listdir("/proc/self/task")
        for thread in threads:
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as listing:
                pids += map(int, listing.read().split())
        if set(threads) <= set(os.listdir("/proc/self/task")):
            return pids


def end_orphans(spared: Collection[int], patience_s: float) -> list[int]:
    """Wait until all children have ended except the spared ones; kill them after `patience_s` seconds.

    Includes orphaned descendants, which this process adopts. Returns the pids that had to be killed. Reaps children, so
    no other code may wait for them.
    """
    deadline, killed = time.monotonic() + patience_s, list[int]()
    while pending := [pid for pid in list_children() if pid not in spared]:
        for pid in pending:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    continue
            if time.monotonic() > deadline and pid not in killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        time.sleep(_LOOK_S)
    return killed


def is_stopped(pid: int) -> bool:
    """Return whether a signal stopped the process (state `T`); a debugger's stop is `t` and does not count."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def is_tracker(pid: int) -> bool:
    """Return whether a process is one of Python's resource trackers, which remove what others left in shared memory
    after these have exited, and then exit themselves."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return b"resource_tracker" in command.read()
    except OSError:
        return False


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when `parent`, or its thread that started this one, dies; exit if it
    has already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def ignore_signals(*numbers: signal.Signals) -> None:
    """Ignore signals with a handler, which programs that this process starts do not inherit, unlike SIG_IGN."""
    for number in numbers:
        signal.signal(number, lambda number, frame: None)


def inherit_orphans() -> None:
    """Adopt all orphaned descendants (subreaper)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


INHERITED_VARIABLES = (
    *("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"),
    *("PYTHONHASHSEED", "MEGARL_SANDBOX"),
)
"""Variables that are inherited, in addition to all that begin with LC_. None of them is a secret."""


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a worker process."""

    pass_env: tuple[str, ...] = ()
    """Further variables to inherit if set."""
    memory_mb: int = 0
    """MiB of data that a process may have; 0 for no limit."""


NO_LIMITS = ProcessLimits()


def clean_environment(pass_env: Sequence[str] = (), source: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a worker process, taken from `source`, by default this process's environment."""
    source = os.environ if source is None else source
    names = [name for name in source if name in INHERITED_VARIABLES or name in pass_env or name.startswith("LC_")]
    path = os.pathsep.join(filter(None, sys.path))
    # One thread each, because there are about as many processes as cores; inherited variables override these.
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | {name: source[name] for name in names}


def apply_limits(memory_mb: int) -> None:
    """Limit memory and disable core dumps of this process and of each that it starts; the OOM killer prefers them."""
    limits = {resource.RLIMIT_CORE: 0} | ({resource.RLIMIT_DATA: memory_mb << 20} if memory_mb else {})
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
