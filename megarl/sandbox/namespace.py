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
from megarl.sandbox.poller import Ends
from megarl.sandbox.spawning import CHANNEL, Bare, Spawner

_PIECE = 1 << 16
_ARRIVES_S = 30.0
"""Bubblewrap has told of its first process after a few milliseconds, or never."""
_OWN_FILES = 8
"""Folders of ours in its file system."""


class Home(Protocol):
    """Where nests are."""

    place: str
    spawner: Spawner | Bare
    cgroups: Cgroups | None
    ends: Ends

    def started(self, nest: Nest) -> None: ...
    def removed(self, nest: Nest) -> None: ...


@dataclass(frozen=True)
class Form:
    """What cannot be changed any more when bubblewrap has begun, or not cheaply."""

    command: tuple[str, ...]
    channel: bool
    memory: int
    """Bytes that its memory cgroup may have, where there is one."""


class Nest:
    """For one box, and never for another: it is ended with it."""

    def __init__(self, home: Home, number: int, form: Form, disk_mb: int, files: int) -> None:
        self.form = form
        self.folder = f"{home.place}/boxes/{number}"
        self.ends: dict[int, int] = {}
        """Ours of its stdout, its stderr and its channel, by their number in the box."""
        self.outer = self.first = 0
        """Its bubblewrap, which is ours to reap, and its first process, with which all others in it end; 0 before."""
        self.status: int | None = None
        """How the command has ended."""
        self.outer_code = 0
        self.fault = ""
        self.come: Callable[[], None] = _nothing
        """Called when the first process is there."""
        self.over: Callable[[], None] = _nothing
        """Called when nothing runs in it any more."""
        self._home = home
        self._room = disk_mb, files
        self._stdin = self._first_handle = self._status_end = self._gate = -1
        self._status_text = b""
        self._group = ""
        self._doomed = False
        self._began = time.monotonic()

    def start(self) -> None:
        """Raises OSError; what there is of it then goes with `remove`."""
        spawner = self._home.spawner
        os.mkdir(self.folder, 0o700)
        if spawner.boxed:
            mounts.new_files(self.folder, *_size(*self._room))
        for name in ("tmp", "shm"):
            os.mkdir(f"{self.folder}/{name}", 0o700)
        theirs: dict[int, int] = {}
        try:
            theirs[0], self._stdin = os.pipe2(os.O_CLOEXEC)
            for number in (1, 2):
                self.ends[number], theirs[number] = os.pipe2(os.O_CLOEXEC)
            if self.form.channel:
                near, far = socket.socketpair()
                self.ends[CHANNEL], theirs[CHANNEL] = near.detach(), far.detach()
            self.outer, self._status_end, self._gate = spawner.start(self.form.command, self.folder, theirs)
        finally:
            for end in theirs.values():
                os.close(end)
        self._home.started(self)
        if spawner.boxed:
            self._home.ends.listen(self._status_end, self._hear)
        else:
            self._arrive(self.outer)

    def fit(self, disk_mb: int, files: int) -> None:
        """Let it have so much room, whatever it was made with. Raises OSError."""
        if (disk_mb, files) != self._room:
            mounts.resize(self.folder, *_size(disk_mb, files))
            self._room = disk_mb, files

    def alive(self) -> bool:
        """Whether its bubblewrap is, and its first process is or is still to come."""
        if self._doomed or self._status_end < 0:
            return False
        if os.waitid(os.P_PID, self.outer, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        look = select.poll()
        if self._first_handle >= 0:
            look.register(self._first_handle, select.POLLIN)
        return not look.poll(0)

    def feed(self, stdin: bytes) -> None:
        """All that its stdin will have."""
        end, self._stdin = self._stdin, -1
        self._home.ends.send(end, stdin, last=True)

    def open(self) -> None:
        """Let the command begin."""
        if self._gate >= 0:
            os.write(self._gate, b"\n")

    def kill(self) -> None:
        """All that is in it; `over` is called when they are gone.

        Where bubblewrap has not told of the first process yet, as soon as it does: that one does not end with
        bubblewrap before it is at the gate."""
        self._doomed = True
        with contextlib.suppress(ProcessLookupError):
            if not self._home.spawner.boxed:
                os.killpg(self.outer, signal.SIGKILL)
            elif self._first_handle >= 0:
                signal.pidfd_send_signal(self._first_handle, signal.SIGKILL)
            elif self.outer and time.monotonic() > self._began + _ARRIVES_S:
                os.kill(self.outer, signal.SIGKILL)

    def left(self, status: int) -> None:
        """Bubblewrap has ended; wait for the first process, with which all others go."""
        self.outer_code = os.waitstatus_to_exitcode(status)
        if self._status_end >= 0:
            self._hear()
        if self._first_handle >= 0 or not self._home.spawner.boxed:
            self.kill()
        if self._first_handle >= 0:
            self._home.ends.listen(self._first_handle, lambda: self.over())
        else:
            self.over()

    def full(self) -> bool:
        """Whether the kernel has ended it for its memory; asked once, when nothing runs in it any more."""
        group, self._group = self._group, ""
        return bool(group and self._home.cgroups and self._home.cgroups.leave(group))

    def remove(self) -> None:
        """Leave nothing of what nothing runs in."""
        self.full()
        for end in (*self.ends.values(), self._status_end, self._first_handle, self._stdin):
            if end >= 0:
                self._home.ends.close(end)
        if self._gate >= 0:
            os.close(self._gate)
        self.ends.clear()
        self._status_end = self._first_handle = self._stdin = self._gate = -1
        if self._home.spawner.boxed:
            with contextlib.suppress(OSError):
                mounts.unmount(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._home.removed(self)

    def _arrive(self, first: int) -> None:
        try:
            self._first_handle = os.pidfd_open(first)
            if self._home.cgroups:
                self._group = self._home.cgroups.join(first, self.form.memory)
        except OSError as error:  # ended as soon as it had begun
            self.fault = str(error)
            self.kill()
            return
        if self._doomed:
            self.kill()
            return
        self.first = first
        self.come()

    def _hear(self) -> None:
        try:
            piece = os.read(self._status_end, _PIECE)
        except BlockingIOError:
            return
        self._status_text += piece
        *lines, self._status_text = self._status_text.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "child-pid" in said:
                self._arrive(said["child-pid"])
            elif "exit-code" in said:
                code = said["exit-code"]
                self.status = code if code <= 128 or code > 192 else 128 - code
        if not piece:
            self._home.ends.close(self._status_end)
            self._status_end = -1


def _size(disk_mb: int, files: int) -> tuple[int, int]:
    return (disk_mb << 20) + _PIECE, files + _OWN_FILES


def _nothing() -> None:
    pass
