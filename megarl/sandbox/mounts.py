"""Namespaces and mounts of the process that starts boxes, which gives up root for good (`README.md` says why).

In its user and mount namespaces it can mount a file system of fixed size and file count for each box. It is the first
process of its PID namespace, so the kernel ends all boxes with it, whatever ended it.
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
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_NOBODY = 65534
_PAGES_OF_FOLDERS, _NUM_FOLDERS = 1 << 16, 8  # our folders in the file system of a box, beyond its limits
_FIRST_RUNNER_UID = 0x70000000
"""Each process that starts boxes has its own user id from here on, so that none can reach another's."""

SITE_PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
"""The interpreter's site-packages; boxes see only the packages that they are given."""

_libc = ctypes.CDLL(None, use_errno=True)


def make_private_folder(path: str) -> None:
    """Create a folder that only this user may enter, or accept an existing one. Raises OSError if it is not private."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise PermissionError(f"{path} exists and is not a private folder of this user; remove it") from None


def enter_namespaces(
    root: str, python: str, packages: Sequence[str], transfer_ownership: Callable[[int], None]
) -> tuple[str, int]:
    """Become nobody in new namespaces, with `python`, `packages`, and an empty folder `boxes` mounted in `root`.

    Root first calls `transfer_ownership` with the user that it becomes, to transfer what it will need. Returns a
    description of the new user, and the pid as seen from outside. The caller continues in a child process: the original
    process only waits for that child and exits with its status. Raises OSError with what failed.
    """
    user, group = os.geteuid(), os.getegid()
    description = f"runs as user {user}"
    if user == 0:
        _call("unshare", _CLONE_NEWNS, what="a mount namespace")
        _mount_layout(root, python, packages)
        description = _drop_root(transfer_ownership)
        user, group = os.geteuid(), os.getegid()
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise we could not write the maps below
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID, what="a user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if description.startswith("runs"):
        _mount_layout(root, python, packages)
    mount("tmpfs", f"{root}/boxes", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0700")
    return description, _become_init()


def _become_init() -> int:
    """Continue as the first process of the new PID namespace. Returns its pid as seen from outside."""
    parent_fd = os.pidfd_open(os.getpid())
    init_pid = os.fork()
    if init_pid:
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        _, status = os.waitpid(init_pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([parent_fd], [], [], 0)[0]:  # the parent had exited before the death signal was set
        os._exit(1)
    os.close(parent_fd)
    outer_pid = int(os.readlink("/proc/self"))
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    return outer_pid


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2). Raises OSError."""
    arguments = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode())
    _call("mount", *arguments, what=f"mounting {target}")


def mount_tmpfs(path: str, disk_mb: int, files: int, resize: bool = False) -> None:
    """Mount a tmpfs with room for `disk_mb` MiB in `files` files, or change the limits of one that is mounted.

    The latter includes its bind mounts elsewhere. Raises OSError.
    """
    flags = _MS_NOSUID | _MS_NODEV | (_MS_REMOUNT if resize else 0)
    limits = f"size={(disk_mb << 20) + _PAGES_OF_FOLDERS},nr_inodes={files + _NUM_FOLDERS}"
    mount("tmpfs", path, "tmpfs", flags, limits if resize else f"mode=0700,{limits}")


def unmount(path: str) -> None:
    _call("umount2", path.encode(), _MNT_DETACH, what=f"unmounting {path}")


def _mount_layout(root: str, python: str, packages: Sequence[str]) -> None:
    mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=1m")
    for name in ("boxes", "python", "packages"):
        os.mkdir(f"{root}/{name}", 0o755)
    mount(python, f"{root}/python", "", _MS_BIND | _MS_REC)
    site_packages = f"{root}/python/{SITE_PACKAGES}"
    if os.path.isdir(site_packages):  # hide this machine's packages; some run code at every start of Python
        mount("tmpfs", site_packages, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=4k")
    for path in packages:
        target = f"{root}/packages/{os.path.basename(path)}"
        os.mkdir(target)
        mount(path, target, "", _MS_BIND | _MS_REC)


def _drop_root(transfer_ownership: Callable[[int], None]) -> str:
    """Switch for good to a user that owns nothing on this machine."""
    for user in (_FIRST_RUNNER_UID + os.getpid(), _NOBODY):
        try:
            transfer_ownership(user)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:  # a user namespace that maps few ids
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
