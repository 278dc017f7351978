"""A box before anything runs in it: a file system, ends, namespaces with all of it mounted, and a gate where it waits.

Bubblewrap does all of that before it reads from the gate; what comes behind it is one fork and the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megarl.sandbox import mounts
from megarl.sandbox.cgroups import Cgroups
from megarl.sandbox.poller import Poller
from megarl.sandbox.spawning import CHANNEL, BareSpawner, Spawner

_PIECE = 1 << 16
_START_TIMEOUT_S = 30.0
"""Bubblewrap has told of its first process after a few milliseconds, or never."""
_OWN_FILES = 8
"""Folders of ours in its file system."""


class NamespaceHost(Protocol):
    """Where nests are."""

    root: str
    spawner: Spawner | BareSpawner
    cgroups: Cgroups | None
    poller: Poller

    def on_namespace_started(self, nest: BoxNamespace) -> None: ...
    def on_namespace_removed(self, nest: BoxNamespace) -> None: ...


@dataclass(frozen=True)
class BoxSpec:
    """What cannot be changed any more when bubblewrap has begun, or not cheaply."""

    command: tuple[str, ...]
    has_channel: bool
    memory_bytes: int
    """Bytes that its memory cgroup may have, where there is one."""


class BoxNamespace:
    """For one box, and never for another: it is ended with it."""

    def __init__(self, home: NamespaceHost, number: int, form: BoxSpec, disk_mb: int, files: int) -> None:
        self.spec = form
        self.folder = f"{home.root}/boxes/{number}"
        self.fds: dict[int, int] = {}
        """Ours of its stdout, its stderr and its channel, by their number in the box."""
        self.bwrap_pid = self.init_pid = 0
        """Its bubblewrap, which is ours to reap, and its first process, with which all others in it end; 0 before."""
        self.status: int | None = None
        """How the command has ended."""
        self.bwrap_exit_code = 0
        self.error = ""
        self.on_started: Callable[[], None] = _nothing
        """Called when the first process is there."""
        self.on_exited: Callable[[], None] = _nothing
        """Called when nothing runs in it any more."""
        self._host = home
        self._disk_limits = disk_mb, files
        self._stdin = self._init_pidfd = self._status_end = self._gate = -1
        self._status_text = b""
        self._group = ""
        self._is_killed = False
        self._began = time.monotonic()

    def start(self) -> None:
        """Raises OSError; what there is of it then goes with `remove`."""
        spawner = self._host.spawner
        os.mkdir(self.folder, 0o700)
        if spawner.is_boxed:
            mounts.mount_tmpfs(self.folder, *_compute_tmpfs_size(*self._disk_limits))
        for name in ("tmp", "shm"):
            os.mkdir(f"{self.folder}/{name}", 0o700)
        theirs: dict[int, int] = {}
        try:
            theirs[0], self._stdin = os.pipe2(os.O_CLOEXEC)
            for number in (1, 2):
                self.fds[number], theirs[number] = os.pipe2(os.O_CLOEXEC)
            if self.spec.has_channel:
                near, far = socket.socketpair()
                self.fds[CHANNEL], theirs[CHANNEL] = near.detach(), far.detach()
            self.bwrap_pid, self._status_end, self._gate = spawner.start(self.spec.command, self.folder, theirs)
        finally:
            for end in theirs.values():
                os.close(end)
        self._host.on_namespace_started(self)
        if spawner.is_boxed:
            self._host.poller.listen(self._status_end, self._read_status)
        else:
            self._on_init_started(self.bwrap_pid)

    def resize(self, disk_mb: int, files: int) -> None:
        """Let it have so much room, whatever it was made with. Raises OSError."""
        if (disk_mb, files) != self._disk_limits:
            mounts.resize_tmpfs(self.folder, *_compute_tmpfs_size(disk_mb, files))
            self._disk_limits = disk_mb, files

    def is_alive(self) -> bool:
        """Whether its bubblewrap is, and its first process is or is still to come."""
        if self._is_killed or self._status_end < 0:
            return False
        if os.waitid(os.P_PID, self.bwrap_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        look = select.poll()
        if self._init_pidfd >= 0:
            look.register(self._init_pidfd, select.POLLIN)
        return not look.poll(0)

    def write_stdin(self, stdin: bytes) -> None:
        """All that its stdin will have."""
        end, self._stdin = self._stdin, -1
        self._host.poller.send(end, stdin, last=True)

    def open_gate(self) -> None:
        """Let the command begin."""
        if self._gate >= 0:
            os.write(self._gate, b"\n")

    def kill(self) -> None:
        """All that is in it; `over` is called when they are gone.

        Where bubblewrap has not told of the first process yet, as soon as it does: that one does not end with
        bubblewrap before it is at the gate."""
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError):
            if not self._host.spawner.is_boxed:
                os.killpg(self.bwrap_pid, signal.SIGKILL)
            elif self._init_pidfd >= 0:
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
            elif self.bwrap_pid and time.monotonic() > self._began + _START_TIMEOUT_S:
                os.kill(self.bwrap_pid, signal.SIGKILL)

    def on_bwrap_exited(self, status: int) -> None:
        """Bubblewrap has ended; wait for the first process, with which all others go."""
        self.bwrap_exit_code = os.waitstatus_to_exitcode(status)
        if self._status_end >= 0:
            self._read_status()
        if self._init_pidfd >= 0 or not self._host.spawner.is_boxed:
            self.kill()
        if self._init_pidfd >= 0:
            self._host.poller.listen(self._init_pidfd, lambda: self.on_exited())
        else:
            self.on_exited()

    def was_oom_killed(self) -> bool:
        """Whether the kernel has ended it for its memory; asked once, when nothing runs in it any more."""
        group, self._group = self._group, ""
        return bool(group and self._host.cgroups and self._host.cgroups.remove_group(group))

    def remove(self) -> None:
        """Leave nothing of what nothing runs in."""
        self.was_oom_killed()
        for end in (*self.fds.values(), self._status_end, self._init_pidfd, self._stdin):
            if end >= 0:
                self._host.poller.close(end)
        if self._gate >= 0:
            os.close(self._gate)
        self.fds.clear()
        self._status_end = self._init_pidfd = self._stdin = self._gate = -1
        if self._host.spawner.is_boxed:
            with contextlib.suppress(OSError):
                mounts.unmount(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._host.on_namespace_removed(self)

    def _on_init_started(self, first: int) -> None:
        try:
            self._init_pidfd = os.pidfd_open(first)
            if self._host.cgroups:
                self._group = self._host.cgroups.join(first, self.spec.memory_bytes)
        except OSError as error:  # ended as soon as it had begun
            self.error = str(error)
            self.kill()
            return
        if self._is_killed:
            self.kill()
            return
        self.init_pid = first
        self.on_started()

    def _read_status(self) -> None:
        try:
            piece = os.read(self._status_end, _PIECE)
        except BlockingIOError:
            return
        self._status_text += piece
        *lines, self._status_text = self._status_text.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "child-pid" in said:
                self._on_init_started(said["child-pid"])
            elif "exit-code" in said:
                code = said["exit-code"]
                self.status = code if code <= 128 or code > 192 else 128 - code
        if not piece:
            self._host.poller.close(self._status_end)
            self._status_end = -1


def _compute_tmpfs_size(disk_mb: int, files: int) -> tuple[int, int]:
    return (disk_mb << 20) + _PIECE, files + _OWN_FILES


def _nothing() -> None:
    pass
