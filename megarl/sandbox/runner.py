"""The process that starts boxes. It holds nothing worth stealing and ends with the process that started it.

    python -I -S -c "..." FD PARENT, as `runner_client.py` starts it

Its environment is empty and its only open file is the socket FD. The first message says what to set up, and the answer
says what it has become or why it cannot. Requests follow.

`BoxLimit` bounds the number of concurrent boxes on a machine by locks on the bytes of a file, which the kernel releases
when a process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import resource
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from megarl.processes.children import ignore_signals, inherit_orphans
from megarl.processes.messages import Frame, FrameDecoder, encode_frame
from megarl.sandbox import mounts
from megarl.sandbox.box_memory import Cgroups
from megarl.sandbox.box_process import Box
from megarl.sandbox.namespace import BoxNamespace, WarmPool
from megarl.sandbox.poller import Poller
from megarl.sandbox.spawning import BareSpawner, Spawner, has_nproc_per_box


class BoxLimit:
    """Limit on running boxes, shared by all processes that have the same file open."""

    def __init__(self, path: str, count: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._free = set(range(count))
        self._last = os.getpid() % count  # processes start at different slots
        self._count = count

    def acquire(self) -> int | None:
        """Acquire a slot. Returns None if all are taken."""
        for i in range(self._count):
            number = (self._last + i) % self._count
            if number in self._free and self._lock(number, fcntl.F_WRLCK):
                self._free.remove(number)
                self._last = number
                return number
        return None

    def release(self, number: int) -> None:
        self._lock(number, fcntl.F_UNLCK)
        self._free.add(number)

    def _lock(self, number: int, kind: int) -> bool:
        """Lock or unlock a slot.

        The lock belongs to the open file, not to the process, so it also excludes within a process.
        """
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0))
        except OSError:
            return False
        return True


_LATEST_S = 3600.0
_TRY_AGAIN_S = 0.002
_PIECE = 1 << 20


class Runner:
    """All boxes of one process."""

    def __init__(self, wire: socket.socket, decoder: FrameDecoder, setup: dict[str, Any]) -> None:
        self.poller = Poller()
        self.cores = os.cpu_count() or 1
        self.has_nproc_per_box = has_nproc_per_box() and not setup["old"]
        self.cgroups: Cgroups | None = None
        self.layers: list[str] = []
        self.missing: list[str] = []
        self.pid = os.getpid()
        """As seen from outside its namespaces."""
        self._decoder = decoder
        self._boxes: dict[int, Box] = {}
        self._slots: dict[Box, int] = {}
        self._by_bwrap_pid: dict[int, BoxNamespace] = {}
        self._waiting: deque[tuple[Box, Callable[[], None]]] = deque()
        self.root = setup["root"]
        mounts.make_private_folder(self.root)
        self._box_limit = BoxLimit(f"{self.root}/turns", setup["processes"])
        self.spawner: Spawner | BareSpawner
        if setup["bwrap"]:
            self._drop_privileges(setup)
        else:
            self.spawner = BareSpawner(setup["python"])
            self.root = tempfile.mkdtemp(prefix="boxes-", dir=self.root)
            os.mkdir(f"{self.root}/boxes")
        self.warm_pool = WarmPool(self, setup["processes"])
        self._wire = wire.detach()
        self.poller.listen(self._wire, self._on_readable)

    def _drop_privileges(self, setup: dict[str, Any]) -> None:
        self.cgroups = Cgroups.find() if setup["cgroups"] else None
        description, self.pid = mounts.enter_namespaces(
            self.root,
            setup["python"],
            setup["packages"],
            self.cgroups.transfer_ownership if self.cgroups else lambda user: None,
        )
        self.spawner = Spawner(setup["bwrap"], self.root, setup["python"])
        self.layers = [description, "bubblewrap: private namespaces, read-only files"]
        if self.spawner.has_seccomp:
            self.layers.append("seccomp")
        else:
            self.missing.append(f"no seccomp filter for {platform.machine()}")
        self.layers.append("resource limits")
        if not self.has_nproc_per_box:
            self.missing.append("this kernel counts processes per user only; the watchdog counts those of each box")
        if self.cgroups:
            self.layers.append("memory cgroup")
        else:
            self.layers.append("memory watchdog")
            self.missing.append("no memory cgroup is delegated to this process; the watchdog enforces the limit")

    def run(self) -> None:
        """Serve until the other end of the wire closes."""
        children, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.poller.listen(children, lambda: self._reap(children))
        while True:
            now = time.monotonic()
            wake_time = now + _LATEST_S
            while self._waiting and self._start_next():
                pass
            if self._waiting:
                wake_time = now + _TRY_AGAIN_S
            for box in tuple(self._slots):
                wake_time = min(wake_time, box.check_limits(now))
            wake_time = min(wake_time, self.warm_pool.refill(now))
            self.poller.wait(wake_time - time.monotonic())

    def send(self, message: dict[str, Any], blobs: Sequence[bytes]) -> None:
        self.poller.send(self._wire, encode_frame(message, blobs))

    def on_call_finished(self, box: Box) -> None:
        """Release the slot of a session whose call has finished."""
        self._box_limit.release(self._slots.pop(box))

    def on_namespace_started(self, namespace: BoxNamespace) -> None:
        self._by_bwrap_pid[namespace.bwrap_pid] = namespace

    def on_namespace_removed(self, namespace: BoxNamespace) -> None:
        if self._by_bwrap_pid.get(namespace.bwrap_pid) is namespace:
            del self._by_bwrap_pid[namespace.bwrap_pid]

    def on_box_ended(self, box: Box) -> None:
        self._boxes.pop(box.number, None)
        if box in self._slots:
            self._box_limit.release(self._slots.pop(box))

    def _on_readable(self) -> None:
        try:
            piece = os.read(self._wire, _PIECE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self.shut_down()
        for order, blobs in self._decoder.feed(piece):
            self.handle_order(order, blobs)

    def handle_order(self, order: dict[str, Any], blobs: list[bytes]) -> None:
        number, kind = order["number"], order["kind"]
        if kind in ("run", "open"):
            box = self._boxes[number] = Box(self, order, blobs)
            if kind == "run":
                self._waiting.append((box, box.start))
        elif (target := self._boxes.get(number)) is None:
            if kind == "call":
                response = {"number": number, "kind": "ended", "status": None, "reason": "exit", "seconds": 0.0}
                self.send({**response, "files": [], "refused": {}, "failure": ""}, [b"", b"", b""])
        elif kind == "call":
            self._waiting.append((target, lambda: target.call(order["seconds"], blobs[0])))
        else:
            self._end(target)

    def _end(self, box: Box) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not box)
        if box.has_started:
            box.end("closed")
        else:
            self.on_box_ended(box)

    def _start_next(self) -> bool:
        """Start the first waiting box or call. Returns whether a slot was free."""
        slot = self._box_limit.acquire()
        if slot is None:
            return False
        box, begin = self._waiting.popleft()
        self._slots[box] = slot
        if box.is_finished:
            self.on_box_ended(box)
            return True
        try:
            begin()
        except (OSError, ValueError) as error:
            box.fail(f"{type(error).__name__}: {error}")
        return True

    def _reap(self, children: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(children, _PIECE)
        with contextlib.suppress(ChildProcessError):
            while (waited := os.waitpid(-1, os.WNOHANG))[0]:
                if namespace := self._by_bwrap_pid.pop(waited[0], None):
                    namespace.on_bwrap_exited(waited[1])

    def shut_down(self) -> None:
        """End all boxes and exit. Each box ends with its bubblewrap, and each bubblewrap with this process."""
        self.warm_pool.close()
        for box in tuple(self._boxes.values()):
            box.end("closed")
        if not self.spawner.is_boxed:
            shutil.rmtree(self.root, ignore_errors=True)
        os._exit(0)


def main(wire: socket.socket, parent: int) -> None:
    """Serve until the other end of the wire closes or the parent ends."""
    ignore_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)  # our parent decides when to stop
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    wire.set_inheritable(False)
    inherit_orphans()
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # hundreds of sessions use five each
    decoder = FrameDecoder()
    frames: list[Frame] = []
    while not frames:
        piece = wire.recv(_PIECE)
        if not piece:
            return
        frames = decoder.feed(piece)
    parent_fd = os.pidfd_open(parent)
    try:
        runner = Runner(wire, decoder, frames[0][0])
    except OSError as error:
        wire.sendall(encode_frame({"kind": "refused", "why": str(error)}))
        return
    runner.poller.listen(parent_fd, runner.shut_down)
    runner.send({"kind": "ready", "pid": runner.pid, "layers": runner.layers, "missing": runner.missing}, ())
    for order, blobs in frames[1:]:
        runner.handle_order(order, blobs)
    runner.run()
