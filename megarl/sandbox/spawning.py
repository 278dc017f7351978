"""How a process is put into a box: bubblewrap's arguments and the limits of the kernel, set from outside."""

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
"""Of the root, links to folders in /tmp, that may be made there: where tasks in Harbor's format expect theirs."""
CHANNEL = 3
_ARGUMENTS, _FILTER, _STATUS, _GATE, _HELD = 10, 11, 12, 13, 14
"""Numbers of bubblewrap's own ends; none of them is there in the box."""
_GATE_OF_SHELL = 9
_DEVICES = ("null", "full", "random", "urandom")  # no zero: what is mapped of it is memory that no watchdog sees
_LEAST_ADDRESS_SPACE = 4 << 30
_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these."""


def build_environment(python: str) -> dict[str, str]:
    """Of a box, and of bubblewrap too: its own can be read in the box, in /proc/1/environ."""
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


def build_bwrap_arguments(place: str, python: str, version: tuple[int, ...]) -> list[str]:
    """Bubblewrap's arguments for what is the same in every box: what it sees, and what it is parted from."""
    given = [
        *("--unshare-all", "--unshare-user", "--new-session", "--die-with-parent"),
        *(("--disable-userns",) if version >= (0, 8) else ()),  # else the filter alone does it
        *("--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "box"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = f"/{name}"
        if os.path.islink(path):
            given += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            given += ["--ro-bind", path, path]
    given += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    given += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    if not python.startswith("/usr/") and python != "/usr":
        given += ["--ro-bind", f"{place}/python", python]
    elif os.path.isdir(f"{place}/python/{SITE_PACKAGES}"):  # emptied there, and not in /usr
        given += ["--ro-bind", f"{place}/python/{SITE_PACKAGES}", f"{python}/{SITE_PACKAGES}"]
    if os.listdir(f"{place}/packages"):
        given += ["--ro-bind", f"{place}/packages", PACKAGES]
    given += ["--proc", "/proc", "--size", "65536", "--tmpfs", "/dev"]
    for name in _DEVICES:
        given += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        given += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    for name in FOLDERS:
        given += ["--symlink", f"/tmp/{name}", f"/{name}"]
    given += ["--remount-ro", "/proc"]  # a program could set how soon the kernel ends it when memory is short
    return [*given, "--symlink", "/proc/self/fd", "/dev/fd"]


class Spawner:
    """Starts commands in boxes, each with folders of its own."""

    is_boxed = True

    def __init__(self, bwrap: str, place: str, python: str) -> None:
        self._bwrap = bwrap
        said = subprocess.run([bwrap, "--version"], env={}, capture_output=True, text=True).stdout
        self._view = build_bwrap_arguments(place, python, tuple(map(int, re.findall(r"\d+", said))))
        self._environment = build_environment(python)
        code = seccomp.build_filter(platform.machine())
        self.has_seccomp = code is not None
        self._filter = _create_memory_file(code or b"")

    def start(self, command: Sequence[str], folder: str, ends: Mapping[int, int]) -> tuple[int, int, int]:
        """Bubblewrap's pid, and our ends of two pipes: on the first it says the pid of the box's init, and at last how
        the command has ended; before the command begins, it waits for a line on the second. `ends`: by number in the
        box, what its standard files and its channel are.

        The box's init holds the second pipe open as well: to bubblewrap its end is as good as a line, and the command
        would begin, without limits, when this process has ended, and just before it is killed for that."""
        given = [*self._view, "--bind", f"{folder}/shm", "/dev/shm", "--remount-ro", "/dev"]
        given += ["--bind", f"{folder}/tmp", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
        given += ["--json-status-fd", str(_STATUS), "--block-fd", str(_GATE)]
        given += ["--sync-fd", str(_HELD)]
        if self.has_seccomp:
            given += ["--seccomp", str(_FILTER)]
        arguments = _create_memory_file("\0".join(given).encode() + b"\0")
        said, saying = os.pipe2(os.O_CLOEXEC)
        waiting, gate = os.pipe2(os.O_CLOEXEC)
        program = os.open(f"/proc/self/fd/{self._filter}", os.O_RDONLY | os.O_CLOEXEC)  # with an offset of its own
        inside = {**ends, _ARGUMENTS: arguments, _FILTER: program, _STATUS: saying, _GATE: waiting, _HELD: gate}
        try:
            pid = posix_spawn(
                self._bwrap, ["bwrap", "--args", str(_ARGUMENTS), "--", *command], self._environment, inside
            )
        except BaseException:
            os.close(said)
            os.close(gate)
            raise
        finally:
            for end in (arguments, program, saying, waiting):
                os.close(end)
        return pid, said, gate


class BareSpawner:
    """Starts commands without any box: in a folder and a session of their own, and with limits."""

    is_boxed = False
    has_seccomp = False

    def __init__(self, python: str) -> None:
        self._environment = build_environment(python)

    def start(self, command: Sequence[str], folder: str, ends: Mapping[int, int]) -> tuple[int, int, int]:
        """As a `Spawner`'s, without its first pipe."""
        line = f'read _ <&{_GATE_OF_SHELL} || exit; exec {_GATE_OF_SHELL}<&-; cd "$0" && exec "$@"'
        enter = ["/bin/sh", "-c", line, f"{folder}/tmp", *command]
        own = {**self._environment, "HOME": f"{folder}/tmp", "TMPDIR": f"{folder}/tmp"}
        waiting, gate = os.pipe2(os.O_CLOEXEC)
        try:
            pid = posix_spawn("/bin/sh", enter, own, {**ends, _GATE_OF_SHELL: waiting}, apart=True)
        except BaseException:
            os.close(gate)
            raise
        finally:
            os.close(waiting)
        return pid, -1, gate


def posix_spawn(
    path: str, command: Sequence[str], environment: Mapping[str, str], ends: Mapping[int, int], apart: bool = False
) -> int:
    """Start a program that inherits these ends only, by their numbers there; `apart` in a session of its own. Raises
    OSError. Ours that have such a number themselves are copied out of the way first."""
    moved: list[int] = []
    actions: list[tuple[int, int, int]] = []
    try:
        for number, end in ends.items():
            moved.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 64))
            actions.append((os.POSIX_SPAWN_DUP2, moved[-1], number))
        return os.posix_spawn(
            path, list(command), dict(environment), file_actions=actions, setsid=apart, setsigdef=_DEFAULT
        )
    finally:
        for end in moved:
            os.close(end)


def has_nproc_per_box() -> bool:
    """Whether the kernel counts processes by user namespace, as since 5.14, and not all of a user's alike."""
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (5, 14)


def set_limits(pid: int, limits: Mapping[str, int | float], memory: int, session: bool, counted: bool) -> None:
    """Limits of a process, and of each that it will start; of their number, where they are counted by box. From
    outside: nothing in the box could raise them."""
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
    if counted:
        amounts[resource.RLIMIT_NPROC] = int(limits["processes"]) + 1  # init is one
    if not session:  # whose calls are many
        amounts[resource.RLIMIT_CPU] = math.ceil(limits["seconds"]) + 1
    for kind, amount in amounts.items():
        most = resource.prlimit(pid, kind)[1]
        if most != resource.RLIM_INFINITY:
            amount = min(amount, most)
        resource.prlimit(pid, kind, (amount, amount))


def _create_memory_file(data: bytes) -> int:
    """An open file in memory, at its beginning."""
    file = os.memfd_create("box", os.MFD_CLOEXEC)
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return file
