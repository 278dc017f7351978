"""Where boxes are made: namespaces of the process that starts them, in which its own files are mounted.

That process is nobody: as root it gives up its user id for real, for the root of a user namespace made by true root
can write to `/proc/sys`. Then it takes a user and a mount namespace of its own, in which a file system of fixed size
and number of files can be mounted for each box; and one of processes, of which it is the first, so that the kernel ends
all boxes with it, whatever ended it and however far they are.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Sequence

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 36, 38
_NOBODY = 65534
_FIRST_RUNNER_UID = 0x70000000
"""From here on, each process that starts boxes has a user id of its own, so that none can reach another's."""

SITE_PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
"""Of an interpreter; boxes see none but those that they are given."""

_libc = ctypes.CDLL(None, use_errno=True)


def make_private_folder(path: str) -> None:
    """Make a folder that is ours alone, or take the one that there is. Raises OSError if it is not."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is there, and is not a folder of this user's alone; remove it") from None


def inherit_orphans() -> None:
    """Be the parent of all descendants that lose theirs, so that somebody reaps them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def enter_namespaces(
    place: str, python: str, packages: Sequence[str], hand_over: Callable[[int], None]
) -> tuple[str, int]:
    """Become nobody, with `place` mounted anew: `python` and `packages` in it, and `boxes`, an empty folder.

    Root gives what it will need to `hand_over` first, with the user that it becomes. Returns who it is now, in words,
    and its pid for those outside: in a process of its own, for the one that called it does nothing any more but wait
    for that, and ends as that does. Raises OSError with what failed."""
    user, group = os.geteuid(), os.getegid()
    said = f"runs as user {user}"
    if user == 0:
        _call("unshare", _CLONE_NEWNS, what="a mount namespace")
        _mount_layout(place, python, packages)
        said = _drop_root(hand_over)
        user, group = os.geteuid(), os.getegid()
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else the maps below are not ours to write
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID, what="a user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if said.startswith("runs"):
        _mount_layout(place, python, packages)
    mount("tmpfs", f"{place}/boxes", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0700")
    return said, _become_init()


def _become_init() -> int:
    """Go on as the first process of the namespace that was made; its pid outside of it."""
    before = os.pidfd_open(os.getpid())
    first = os.fork()
    if first:
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        _, status = os.waitpid(first, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    waits = select.poll()
    waits.register(before, select.POLLIN)
    if waits.poll(0):  # and was not there any more to be waited for
        os._exit(1)
    os.close(before)
    outside = int(os.readlink("/proc/self"))
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    return outside


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2); raises OSError."""
    arguments = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode())
    _call("mount", *arguments, what=f"mounting {target}")


def mount_tmpfs(path: str, size: int, files: int) -> None:
    """A file system in memory, of so many bytes and files."""
    mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=0700,size={size},nr_inodes={files}")


def resize_tmpfs(path: str, size: int, files: int) -> None:
    """Another size for what `mount_tmpfs` has made; what is mounted elsewhere of it has it, too."""
    mount("tmpfs", path, "tmpfs", _MS_REMOUNT | _MS_NOSUID | _MS_NODEV, f"size={size},nr_inodes={files}")


def unmount(path: str) -> None:
    _call("umount2", path.encode(), _MNT_DETACH, what=f"unmounting {path}")


def _mount_layout(place: str, python: str, packages: Sequence[str]) -> None:
    mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    mount("tmpfs", place, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=1m")
    for name in ("boxes", "python", "packages"):
        os.mkdir(f"{place}/{name}", 0o755)
    mount(python, f"{place}/python", "", _MS_BIND | _MS_REC)
    others = f"{place}/python/{SITE_PACKAGES}"
    if os.path.isdir(others):  # of this machine, and some begin to work, and to take time, with each start of Python
        mount("tmpfs", others, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=4k")
    for path in packages:
        target = f"{place}/packages/{os.path.basename(path)}"
        os.mkdir(target)
        mount(path, target, "", _MS_BIND | _MS_REC)


def _drop_root(hand_over: Callable[[int], None]) -> str:
    """Become somebody whom nothing on this machine belongs to, for good."""
    for user in (_FIRST_RUNNER_UID + os.getpid(), _NOBODY):
        try:
            hand_over(user)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:  # in a user namespace that maps few
            continue
        return f"dropped from root to user {user}"
    with open("/proc/self/uid_map") as file:
        inside, outside, _ = file.read().split()[:3]
    if int(inside) <= 0 and int(outside) == 0:
        raise PermissionError("root cannot give up its user id here (setresuid is refused)")
    return f"is root of a user namespace, user {outside} outside of it"


def _call(name: str, *arguments: object, what: str) -> None:
    if getattr(_libc, name)(*arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what} is refused ({name}: {os.strerror(code)})")
