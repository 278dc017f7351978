"""Start a process in a box: bubblewrap's arguments, and kernel limits set from outside."""

from __future__ import annotations

import fcntl
import math
import os
import platform
import re
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence

from megarl.sandbox import seccomp
from megarl.sandbox.mounts import SITE_PACKAGES

PACKAGES = "/packages"
FOLDERS = ("app", "tests", "logs")
"""Folders of the root that are links to folders in /tmp, which a program may create; tasks in Harbor's format expect
them."""
CHANNEL = 3
GATE, _ARGUMENTS, _FILTER, STATUS, _HELD = 9, 10, 11, 12, 13
"""Descriptor numbers of bubblewrap's own files, none of which is visible in the box. A shell needs a digit."""
_DEVICES = ("null", "full", "random", "urandom")  # no zero: mapping it is memory that no watchdog counts
_LEAST_ADDRESS_SPACE = 4 << 30
_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores; reset to their default in the box."""


def build_bwrap_arguments(root: str, python: str, version: tuple[int, ...]) -> list[str]:
    """Return bubblewrap's arguments that all boxes share: what a box sees, and what it is isolated from."""
    arguments = [
        *("--unshare-all", "--unshare-user", "--new-session", "--die-with-parent"),
        *(("--disable-userns",) if version >= (0, 8) else ()),  # otherwise only the seccomp filter prevents it
        *("--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "box"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = f"/{name}"
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    arguments += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    if not python.startswith("/usr/") and python != "/usr":
        arguments += ["--ro-bind", f"{root}/python", python]
    elif os.path.isdir(f"{root}/python/{SITE_PACKAGES}"):  # empty there, unlike in /usr
        arguments += ["--ro-bind", f"{root}/python/{SITE_PACKAGES}", f"{python}/{SITE_PACKAGES}"]
    if os.listdir(f"{root}/packages"):
        arguments += ["--ro-bind", f"{root}/packages", PACKAGES]
    arguments += ["--proc", "/proc", "--size", "65536", "--tmpfs", "/dev"]
    for name in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        arguments += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    for name in FOLDERS:
        arguments += ["--symlink", f"/tmp/{name}", f"/{name}"]
    arguments += ["--remount-ro", "/proc"]  # else a program could change its own OOM score
    return [*arguments, "--symlink", "/proc/self/fd", "/dev/fd"]


class Spawner:
    """Starts commands in boxes; without bubblewrap in their own folder and session, with nothing but limits."""

    def __init__(self, bwrap: str, root: str, python: str) -> None:
        self._bwrap, self.is_boxed = bwrap, bool(bwrap)
        # Also of bubblewrap, because a box can read bubblewrap's in /proc/1/environ.
        self._environment = {
            "PATH": f"{python}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "TMPDIR": "/tmp",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONPATH": PACKAGES,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._seccomp_filter = seccomp.build_filter(platform.machine()) if bwrap else None
        self.has_seccomp = self._seccomp_filter is not None
        if bwrap:
            version = subprocess.run([bwrap, "--version"], env={}, capture_output=True, text=True).stdout
            self._view = build_bwrap_arguments(root, python, tuple(map(int, re.findall(r"\d+", version))))

    def start(self, command: Sequence[str], folder: str, fds: Mapping[int, int], gate: int) -> int:
        """Start a command, which waits until a line is written to `gate`. Returns the pid of bubblewrap or a shell.

        fds: open files by their number in the new process: the box's standard files and channel, the other end of the
        gate (`GATE`), and a pipe (`STATUS`) on which bubblewrap reports the pid of the box's init and finally the
        command's exit status.

        The box's init holds the gate open as well. Otherwise, if this process ended, bubblewrap would take the end of
        the pipe for a line and start the command, without limits, just before it is killed for that.
        """
        if not self.is_boxed:
            script = f'read _ <&{GATE} || exit; exec {GATE}<&-; cd "$0" && exec "$@"'
            environment = {**self._environment, "HOME": f"{folder}/tmp", "TMPDIR": f"{folder}/tmp"}
            arguments = ["/bin/sh", "-c", script, f"{folder}/tmp", *command]
            return posix_spawn("/bin/sh", arguments, environment, fds, new_session=True)
        options = [*self._view, "--bind", f"{folder}/shm", "/dev/shm", "--remount-ro", "/dev"]
        options += ["--bind", f"{folder}/tmp", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
        options += ["--json-status-fd", str(STATUS), "--block-fd", str(GATE), "--sync-fd", str(_HELD)]
        options += ["--seccomp", str(_FILTER)] if self.has_seccomp else []
        options_fd = _create_memory_file("\0".join(options).encode() + b"\0")
        filter_fd = _create_memory_file(self._seccomp_filter or b"")
        try:
            arguments = ["bwrap", "--args", str(_ARGUMENTS), "--", *command]
            fds = {**fds, _ARGUMENTS: options_fd, _FILTER: filter_fd, _HELD: gate}
            return posix_spawn(self._bwrap, arguments, self._environment, fds)
        finally:
            os.close(options_fd)
            os.close(filter_fd)


def posix_spawn(
    path: str, command: list[str], environment: Mapping[str, str], fds: Mapping[int, int], new_session: bool = False
) -> int:
    """Start a program that inherits only these descriptors, by their numbers there. Raises OSError.

    Descriptors that already have such a number are first duplicated out of the way.
    """
    duplicates: dict[int, int] = {}
    try:
        for number, fd in fds.items():
            duplicates[number] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in duplicates.items()]
        return os.posix_spawn(path, command, environment, file_actions=actions, setsid=new_session, setsigdef=_DEFAULT)
    finally:
        for fd in duplicates.values():
            os.close(fd)


def set_limits(
    pid: int, limits: Mapping[str, int | float], memory: int, is_session: bool, limit_processes: bool
) -> None:
    """Set the limits of a process and its descendants from outside, so that nothing in the box can raise them.

    limit_processes: whether to limit the number of processes, because the kernel counts them per box.
    """
    space = max(4 * memory, _LEAST_ADDRESS_SPACE)
    amounts = {
        resource.RLIMIT_AS: space,
        resource.RLIMIT_FSIZE: int(limits["disk_mb"]) << 20,
        resource.RLIMIT_NOFILE: int(limits["open_files"]),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 1 << 20,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 1024,
    }
    if limit_processes:
        amounts[resource.RLIMIT_NPROC] = int(limits["processes"]) + 1  # init is one
    if not is_session:  # a session has many calls
        amounts[resource.RLIMIT_CPU] = math.ceil(limits["seconds"]) + 1
    for kind, amount in amounts.items():
        hard_limit = resource.prlimit(pid, kind)[1]
        if hard_limit != resource.RLIM_INFINITY:
            amount = min(amount, hard_limit)
        resource.prlimit(pid, kind, (amount, amount))


def _create_memory_file(data: bytes) -> int:
    """Create an in-memory file with this content, positioned at its beginning."""
    file = os.memfd_create("box", os.MFD_CLOEXEC)
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return file
