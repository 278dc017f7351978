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
_ARGUMENTS, _FILTER, _STATUS, _GATE, _HELD = 10, 11, 12, 13, 14
"""Descriptor numbers of bubblewrap's own files; none is visible in the box."""
_GATE_OF_SHELL = 9
_DEVICES = ("null", "full", "random", "urandom")  # no zero: mapping it is memory that no watchdog counts
_LEAST_ADDRESS_SPACE = 4 << 30
_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores; reset to their default in the box."""


def build_environment(python: str) -> dict[str, str]:
    """Return the environment of a box, and of bubblewrap, because a box can read bubblewrap's in /proc/1/environ."""
    return {
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
    """Starts commands in boxes, each with its own folders."""

    is_boxed = True

    def __init__(self, bwrap: str, root: str, python: str) -> None:
        self._bwrap = bwrap
        version_text = subprocess.run([bwrap, "--version"], env={}, capture_output=True, text=True).stdout
        self._view = build_bwrap_arguments(root, python, tuple(map(int, re.findall(r"\d+", version_text))))
        self._environment = build_environment(python)
        code = seccomp.build_filter(platform.machine())
        self.has_seccomp = code is not None
        self._filter = _create_memory_file(code or b"")

    def start(self, command: Sequence[str], folder: str, fds: Mapping[int, int]) -> tuple[int, int, int]:
        """Start bubblewrap. Returns its pid and our ends of two pipes, status and gate.

        On the first, bubblewrap reports the pid of the box's init and finally the command's exit status. The command
        starts once a line is written to the second. fds: the box's standard files and channel, by number in the box.

        The box's init holds the gate open as well. Otherwise, if this process ended, bubblewrap would take the end of
        the pipe for a line and start the command, without limits, just before it is killed for that.
        """
        options = [*self._view, "--bind", f"{folder}/shm", "/dev/shm", "--remount-ro", "/dev"]
        options += ["--bind", f"{folder}/tmp", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
        options += ["--json-status-fd", str(_STATUS), "--block-fd", str(_GATE)]
        options += ["--sync-fd", str(_HELD)]
        if self.has_seccomp:
            options += ["--seccomp", str(_FILTER)]
        options_fd = _create_memory_file("\0".join(options).encode() + b"\0")
        status_fd, status_writer = os.pipe2(os.O_CLOEXEC)
        gate_reader, gate = os.pipe2(os.O_CLOEXEC)
        filter_fd = os.open(f"/proc/self/fd/{self._filter}", os.O_RDONLY | os.O_CLOEXEC)  # with its own offset
        box_fds = {
            **fds,
            _ARGUMENTS: options_fd,
            _FILTER: filter_fd,
            _STATUS: status_writer,
            _GATE: gate_reader,
            _HELD: gate,
        }
        try:
            pid = posix_spawn(
                self._bwrap, ["bwrap", "--args", str(_ARGUMENTS), "--", *command], self._environment, box_fds
            )
        except BaseException:
            os.close(status_fd)
            os.close(gate)
            raise
        finally:
            for fd in (options_fd, filter_fd, status_writer, gate_reader):
                os.close(fd)
        return pid, status_fd, gate


class BareSpawner:
    """Starts commands without isolation: in their own folder and session, with limits."""

    is_boxed = False
    has_seccomp = False

    def __init__(self, python: str) -> None:
        self._environment = build_environment(python)

    def start(self, command: Sequence[str], folder: str, fds: Mapping[int, int]) -> tuple[int, int, int]:
        """As `Spawner.start`, without the status pipe."""
        script = f'read _ <&{_GATE_OF_SHELL} || exit; exec {_GATE_OF_SHELL}<&-; cd "$0" && exec "$@"'
        shell_command = ["/bin/sh", "-c", script, f"{folder}/tmp", *command]
        environment = {**self._environment, "HOME": f"{folder}/tmp", "TMPDIR": f"{folder}/tmp"}
        gate_reader, gate = os.pipe2(os.O_CLOEXEC)
        try:
            pid = posix_spawn(
                "/bin/sh", shell_command, environment, {**fds, _GATE_OF_SHELL: gate_reader}, new_session=True
            )
        except BaseException:
            os.close(gate)
            raise
        finally:
            os.close(gate_reader)
        return pid, -1, gate


def posix_spawn(
    path: str, command: Sequence[str], environment: Mapping[str, str], fds: Mapping[int, int], new_session: bool = False
) -> int:
    """Start a program that inherits only these descriptors, by their numbers there. Raises OSError.

    new_session: start it in a new session. Descriptors that already have such a number are first duplicated out of the
    way.
    """
    duplicates: list[int] = []
    actions: list[tuple[int, int, int]] = []
    try:
        for number, fd in fds.items():
            duplicates.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64))
            actions.append((os.POSIX_SPAWN_DUP2, duplicates[-1], number))
        return os.posix_spawn(
            path, list(command), dict(environment), file_actions=actions, setsid=new_session, setsigdef=_DEFAULT
        )
    finally:
        for fd in duplicates:
            os.close(fd)


def has_nproc_per_box() -> bool:
    """Return whether the kernel counts processes per user namespace (since 5.14) rather than per user."""
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (5, 14)


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
