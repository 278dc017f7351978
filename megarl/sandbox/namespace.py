"""Prepared boxes before anything runs in them: file system, pipes, namespaces with mounts, and a gate where they wait.

Bubblewrap does all of that before it reads from the gate; after it, only one fork and the command remain. `WarmPool`
prepares them ahead of time, for the specs (same command, same memory) that were requested more than once recently.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Any

from megarl.processes.messages import encode_frame
from megarl.sandbox import mounts
from megarl.sandbox.box_memory import Cgroups
from megarl.sandbox.spawning import CHANNEL, GATE, STATUS, Spawner

_PIECE = 1 << 16
_START_TIMEOUT_S = 30.0
"""Bubblewrap reports its first process within milliseconds, or never."""


class Poller:
    """Event loop for pipes and sockets that have a listener or unsent data. Only `wait` blocks."""

    def __init__(self) -> None:
        self._selector = DefaultSelector()
        self._listeners: dict[int, Callable[[], None]] = {}
        self._pending: dict[int, bytearray] = {}
        self._closing: set[int] = set()

    def listen(self, fd: int, listener: Callable[[], None]) -> None:
        """Call the listener whenever there is something to read, or the other end has closed."""
        os.set_blocking(fd, False)
        self._listeners[fd] = listener
        self._update(fd)

    def send(self, fd: int, data: bytes, close_after: bool = False) -> None:
        """Write as the other end accepts it. With `close_after`, close the descriptor after this data."""
        if close_after:
            self._closing.add(fd)
        os.set_blocking(fd, False)
        self._pending.setdefault(fd, bytearray()).extend(data)
        self._write(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor and discard its unsent data."""
        self._listeners.pop(fd, None)
        self._pending.pop(fd, None)
        self._closing.discard(fd)
        self._update(fd)
        os.close(fd)

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for events and call the listeners."""
        for key, events in self._selector.select(max(0.0, seconds)):
            if events & EVENT_WRITE and key.fd in self._pending:
                self._write(key.fd)
            if events & EVENT_READ and key.fd in self._listeners:
                self._listeners[key.fd]()

    def _write(self, fd: int) -> None:
        data, num_written = self._pending[fd], 0
        try:
            while num_written < len(data):
                num_written += os.write(fd, data[num_written : num_written + _PIECE])
        except BlockingIOError:
            del data[:num_written]
            self._update(fd)
            return
        except OSError:  # the reader has closed it
            pass
        del self._pending[fd]
        if fd in self._closing:
            self.close(fd)
        else:
            self._update(fd)

    def _update(self, fd: int) -> None:
        events = (EVENT_READ if fd in self._listeners else 0) | (EVENT_WRITE if fd in self._pending else 0)
        if fd not in self._selector.get_map():
            if events:
                self._selector.register(fd, events)
        elif events:
            self._selector.modify(fd, events)
        else:
            self._selector.unregister(fd)


@dataclass
class BoxHost:
    """Resources that all boxes of a process share."""

    wire: int
    """Socket to the client."""
    folder: str
    """Folder for the file systems of boxes."""
    spawner: Spawner
    cgroups: Cgroups | None
    has_nproc_per_box: bool
    """Whether the kernel counts processes per box; otherwise the watchdog does."""
    poller: Poller = field(default_factory=Poller)
    namespaces: dict[int, BoxNamespace] = field(default_factory=dict)
    """By the pid of bubblewrap, until that is reaped."""

    def send(self, message: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Send a frame to the client."""
        self.poller.send(self.wire, encode_frame(message, blobs))


@dataclass(frozen=True)
class BoxSpec:
    """Settings that are fixed, or expensive to change, once bubblewrap has started."""

    command: tuple[str, ...]
    has_channel: bool
    memory_bytes: int
    """Limit of its memory cgroup, if there is one."""


class BoxNamespace:
    """Namespaces for one box. Never reused: they end with the box."""

    def __init__(self, host: BoxHost, number: int, spec: BoxSpec, disk_mb: int, files: int) -> None:
        self.spec = spec
        self.folder = f"{host.folder}/{number}"
        self.fds: dict[int, int] = {}
        """Our ends of its stdout, stderr, and channel, by their number in the box."""
        self.bwrap_pid = self.init_pid = 0
        """Pids of bubblewrap, which we reap, and of the box's init, with which all its processes end; 0 before that."""
        self.status: int | None = None
        """Exit status of the command."""
        self.bwrap_exit_code = 0
        self.error = ""
        self.on_started: Callable[[], None] = lambda: None
        """Called when the init process has started."""
        self.on_exited: Callable[[], None] = lambda: None
        """Called when nothing runs in the box any more."""
        self._host = host
        self._disk_limits = disk_mb, files
        self._stdin = self._init_pidfd = self._status_end = self._gate = -1
        self._status_text = b""
        self._group = ""
        self._is_killed = False
        self._began = time.monotonic()

    def start(self) -> None:
        """Start bubblewrap, which stops at the gate. Raises OSError; then `remove` cleans up."""
        spawner = self._host.spawner
        os.mkdir(self.folder, 0o700)
        if spawner.is_boxed:
            mounts.mount_tmpfs(self.folder, *self._disk_limits)
        for name in ("tmp", "shm"):
            os.mkdir(f"{self.folder}/{name}", 0o700)
        box_fds: dict[int, int] = {}
        try:
            box_fds[0], self._stdin = os.pipe2(os.O_CLOEXEC)
            box_fds[GATE], self._gate = os.pipe2(os.O_CLOEXEC)
            for number in (1, 2):
                self.fds[number], box_fds[number] = os.pipe2(os.O_CLOEXEC)
            if self.spec.has_channel:
                local_end, box_end = socket.socketpair()
                self.fds[CHANNEL], box_fds[CHANNEL] = local_end.detach(), box_end.detach()
            if spawner.is_boxed:
                self._status_end, box_fds[STATUS] = os.pipe2(os.O_CLOEXEC)
            self.bwrap_pid = spawner.start(self.spec.command, self.folder, box_fds, self._gate)
        finally:
            for fd in box_fds.values():
                os.close(fd)
        self._host.namespaces[self.bwrap_pid] = self
        if spawner.is_boxed:
            self._host.poller.listen(self._status_end, self._read_status)
        else:
            self._on_init_started(self.bwrap_pid)

    def resize(self, disk_mb: int, files: int) -> None:
        """Change the disk limits. Raises OSError."""
        if (disk_mb, files) != self._disk_limits:
            mounts.mount_tmpfs(self.folder, disk_mb, files, resize=True)
            self._disk_limits = disk_mb, files

    def is_alive(self) -> bool:
        """Return whether bubblewrap is alive and its init process has not ended."""
        if self._is_killed or self._status_end < 0:
            return False
        if os.waitid(os.P_PID, self.bwrap_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        poller = select.poll()
        if self._init_pidfd >= 0:
            poller.register(self._init_pidfd, select.POLLIN)
        return not poller.poll(0)

    def write_stdin(self, stdin: bytes) -> None:
        """Write all of stdin and close it."""
        fd, self._stdin = self._stdin, -1
        self._host.poller.send(fd, stdin, close_after=True)

    def open_gate(self) -> None:
        """Let the command start."""
        os.write(self._gate, b"\n")

    def kill(self) -> None:
        """Kill everything in the box; `on_exited` is called when the processes have ended.

        If bubblewrap has not reported the init process yet, the kill follows as soon as it does: until it reaches the
        gate, that process does not end with bubblewrap.
        """
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError):
            if not self._host.spawner.is_boxed:
                os.killpg(self.bwrap_pid, signal.SIGKILL)
            elif self._init_pidfd >= 0:
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
            elif self.bwrap_pid and time.monotonic() > self._began + _START_TIMEOUT_S:
                os.kill(self.bwrap_pid, signal.SIGKILL)

    def on_bwrap_exited(self, status: int) -> None:
        """Handle bubblewrap's exit: wait for the init process, with which all others end."""
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
        """Return whether the kernel killed a process for its memory.

        Call once, when nothing runs in the box any more.
        """
        group, self._group = self._group, ""
        return bool(group and self._host.cgroups and self._host.cgroups.remove_group(group))

    def remove(self) -> None:
        """Release everything, once nothing runs in the box any more."""
        self.was_oom_killed()
        for fd in (*self.fds.values(), self._status_end, self._init_pidfd, self._stdin, self._gate):
            if fd >= 0:
                self._host.poller.close(fd)
        self.fds.clear()
        self._status_end = self._init_pidfd = self._stdin = self._gate = -1
        if self._host.spawner.is_boxed:
            with contextlib.suppress(OSError):
                mounts.unmount(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._host.namespaces.get(self.bwrap_pid) is self:
            del self._host.namespaces[self.bwrap_pid]

    def _on_init_started(self, init_pid: int) -> None:
        try:
            self._init_pidfd = os.pidfd_open(init_pid)
            if self._host.cgroups:
                self._group = self._host.cgroups.join(init_pid, self.spec.memory_bytes)
        except OSError as error:  # ended right after it started
            self.error, self._is_killed = str(error), True
        if self._is_killed:
            self.kill()
            return
        self.init_pid = init_pid
        self.on_started()

    def _read_status(self) -> None:
        try:
            piece = os.read(self._status_end, _PIECE)
        except BlockingIOError:
            return
        *lines, self._status_text = (self._status_text + piece).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "child-pid" in message:
                self._on_init_started(message["child-pid"])
            elif "exit-code" in message:
                code = message["exit-code"]
                self.status = code if code <= 128 or code > 192 else 128 - code
        if not piece:
            self._host.poller.close(self._status_end)
            self._status_end = -1


MAX_IDLE, MAX_IDLE_PER_SPEC = 8, 4
"""Maximum idle namespaces, in total and per spec."""
_REMEMBERED = 16
"""Specs remembered. A policy's programs with their own commands are many, and each comes once."""
IDLE_S = 60.0
_STALE_S = 5.0
"""A spec that nobody has requested for this long gives way to another; otherwise three alternating specs would evict
each other."""
AGAIN_S = 1.0
"""Delay after a namespace died or could not be created."""


@dataclass
class _Demand:
    times: int
    last: float
    disk_limits: tuple[int, int]


class WarmPool:
    """Idle namespaces of one process that starts boxes, in its event loop."""

    def __init__(self, host: BoxHost, max_boxes: int) -> None:
        self._host = host
        self._max_idle = min(MAX_IDLE, max_boxes) if host.spawner.is_boxed else 0
        self._idle: list[BoxNamespace] = []
        self._demand: OrderedDict[BoxSpec, _Demand] = OrderedDict()  # the latest last
        self._numbers = itertools.count(1)
        self._retry_at = 0.0

    def take(self, spec: BoxSpec, disk_mb: int, files: int) -> BoxNamespace:
        """Return an unused namespace: an idle one, or a new one. Raises OSError."""
        times = self._demand.pop(spec).times + 1 if spec in self._demand else 1
        self._demand[spec] = _Demand(times, time.monotonic(), (disk_mb, files))
        while len(self._demand) > _REMEMBERED:
            self._forget(next(iter(self._demand)))
        for namespace in self._list_idle(spec):
            with contextlib.suppress(OSError):  # if it cannot be resized, a new one raises the reason, if there is any
                if namespace.is_alive():
                    namespace.resize(disk_mb, files)
                    self._idle.remove(namespace)
                    return namespace
            self._discard(namespace)
        return self._create(spec, disk_mb, files)

    def refill(self, now: float) -> float:
        """Create a missing namespace and end those that nobody requests any more. Returns the time of the next call."""
        for spec, demand in tuple(self._demand.items()):
            if now >= demand.last + IDLE_S:
                self._forget(spec)
        wake_time = min((demand.last for demand in self._demand.values()), default=now) + IDLE_S
        for spec, demand in reversed(self._demand.items()):  # the most recently requested first
            if len(self._list_idle(spec)) >= min(MAX_IDLE_PER_SPEC, demand.times - 1):
                continue
            if len(self._idle) >= self._max_idle and not self._make_room(now):
                continue
            if now < self._retry_at:
                return min(wake_time, self._retry_at)
            try:
                namespace = self._create(spec, *demand.disk_limits)
            except OSError:
                self._retry_at = now + AGAIN_S
                return min(wake_time, self._retry_at)
            namespace.on_exited = partial(self._on_lost, namespace)
            self._idle.append(namespace)
            return now
        return wake_time

    def close(self) -> None:
        """Kill all idle namespaces."""
        for spec in tuple(self._demand):
            self._forget(spec)

    def _list_idle(self, spec: BoxSpec) -> list[BoxNamespace]:
        return [namespace for namespace in self._idle if namespace.spec == spec]

    def _make_room(self, now: float) -> bool:
        for spec, demand in self._demand.items():
            if now < demand.last + _STALE_S:
                return False
            if idle := self._list_idle(spec):
                self._discard(idle[0])
                return True
        return False

    def _forget(self, spec: BoxSpec) -> None:
        del self._demand[spec]
        for namespace in self._list_idle(spec):
            self._discard(namespace)

    def _discard(self, namespace: BoxNamespace) -> None:
        self._idle.remove(namespace)
        namespace.on_exited = namespace.remove
        namespace.kill()

    def _on_lost(self, namespace: BoxNamespace) -> None:
        """Handle a namespace that ended while idle."""
        self._idle.remove(namespace)
        namespace.remove()
        self._retry_at = time.monotonic() + AGAIN_S
        # Without an init process none can start: the next request raises the reason.
        if not namespace.init_pid and namespace.spec in self._demand:
            self._forget(namespace.spec)

    def _create(self, spec: BoxSpec, disk_mb: int, files: int) -> BoxNamespace:
        namespace = BoxNamespace(self._host, next(self._numbers), spec, disk_mb, files)
        try:
            namespace.start()
        except BaseException:
            namespace.remove()
            raise
        return namespace
