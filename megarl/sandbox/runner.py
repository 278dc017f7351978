"""The process that starts boxes. It holds nothing worth stealing and ends with the process that started it.

Its environment is empty and its only open file is the socket to `runner_client.py`. The first message says what to set
up, and the answer says what it has become or why it cannot. Requests follow.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from megarl.processes.children import ignore_signals, inherit_orphans
from megarl.processes.messages import Frame, FrameDecoder, encode_frame
from megarl.sandbox import mounts
from megarl.sandbox.box_memory import Cgroups
from megarl.sandbox.box_process import Box
from megarl.sandbox.namespace import BoxHost, WarmPool
from megarl.sandbox.spawning import Spawner


class BoxLimit:
    """Limit on the boxes that run on this machine: locks on the bytes of a file, which the kernel releases at exit."""

    def __init__(self, path: str, count: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._taken: set[int] = set()
        self._last = os.getpid() % count  # processes start at different slots
        self._count = count

    def acquire(self) -> int | None:
        """Acquire a slot. Returns None if all are taken."""
        for i in range(self._count):
            number = (self._last + i) % self._count
            if number not in self._taken:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
                    self._taken.add(number)
                    self._last = number
                    return number
        return None

    def release(self, number: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)
        self._taken.remove(number)


_LATEST_S = 3600.0
_TRY_AGAIN_S = 0.002
_PIECE = 1 << 20


class Runner:
    """All boxes of one process."""

    def __init__(self, wire: socket.socket, decoder: FrameDecoder, setup: dict[str, Any]) -> None:
        self._decoder = decoder
        self._boxes: dict[int, Box] = {}
        self._slots: dict[Box, int] = {}
        self._waiting: deque[tuple[Box, Callable[[], None]]] = deque()
        root = setup["root"]
        mounts.make_private_folder(root)
        self._box_limit = BoxLimit(f"{root}/turns", setup["processes"])
        # Older kernels count processes per user.
        has_nproc_per_box = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (5, 14)
        cgroups = Cgroups.find() if setup["bwrap"] else None
        self.info: dict[str, Any] = {"pid": os.getpid(), "layers": [], "missing": []}
        """For the client; the pid is as seen from outside its namespaces."""
        if setup["bwrap"]:
            transfer = cgroups.transfer_ownership if cgroups else lambda user: None
            user, self.info["pid"] = mounts.enter_namespaces(root, setup["python"], setup["packages"], transfer)
        spawner = Spawner(setup["bwrap"], root, setup["python"])
        folder = f"{root}/boxes" if setup["bwrap"] else tempfile.mkdtemp(prefix="boxes-", dir=root)
        self.host = BoxHost(wire.detach(), folder, spawner, cgroups, has_nproc_per_box)
        if setup["bwrap"]:
            self.info["layers"], self.info["missing"] = _describe_layers(user, self.host)
        self.warm_pool = WarmPool(self.host, setup["processes"])
        self.host.poller.listen(self.host.wire, self._on_readable)

    def run(self) -> None:
        """Serve until the other end of the wire closes."""
        children, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.host.poller.listen(children, lambda: self._reap(children))
        while True:
            for box in [box for box in self._slots if box.is_finished or not box.is_running]:
                self._box_limit.release(self._slots.pop(box))
            self._boxes = {number: box for number, box in self._boxes.items() if not box.is_finished}
            self._start_waiting()
            now = time.monotonic()
            wake_time = now + (_TRY_AGAIN_S if self._waiting else _LATEST_S)
            for box in self._slots:
                wake_time = min(wake_time, box.check_limits(now))
            wake_time = min(wake_time, self.warm_pool.refill(now))
            self.host.poller.wait(wake_time - time.monotonic())

    def _start_waiting(self) -> None:
        """Start the first waiting boxes and calls, one for each free slot."""
        while self._waiting:
            box, begin = self._waiting[0]
            if not box.is_ending:
                slot = self._box_limit.acquire()
                if slot is None:
                    return
                try:
                    begin()
                except (OSError, ValueError) as error:
                    box.end(failure=f"{type(error).__name__}: {error}")
                if box.is_finished:
                    self._box_limit.release(slot)
                else:
                    self._slots[box] = slot
            self._waiting.popleft()

    def _on_readable(self) -> None:
        try:
            piece = os.read(self.host.wire, _PIECE)
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
        box = self._boxes.get(number)
        if kind in ("run", "open"):
            box = self._boxes[number] = Box(self.host, self.warm_pool, order, blobs)
            if kind == "run":
                self._waiting.append((box, box.start))
        elif box is None or box.is_finished:
            if kind == "call":
                self.host.send({"number": number, "kind": "ended", "reason": "exit", "seconds": 0.0}, [b"", b"", b""])
        elif kind == "call":
            self._waiting.append((box, partial(box.call, order["seconds"], blobs[0])))
        else:
            box.end("closed")

    def _reap(self, children: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(children, _PIECE)
        with contextlib.suppress(ChildProcessError):
            while (waited := os.waitpid(-1, os.WNOHANG))[0]:
                if namespace := self.host.namespaces.pop(waited[0], None):
                    namespace.on_bwrap_exited(waited[1])

    def shut_down(self) -> None:
        """End all boxes and exit. Each box ends with its bubblewrap, and each bubblewrap with this process."""
        self.warm_pool.close()
        for box in self._boxes.values():
            box.end("closed")
        if not self.host.spawner.is_boxed:
            shutil.rmtree(self.host.folder, ignore_errors=True)
        os._exit(0)


def _describe_layers(user: str, host: BoxHost) -> tuple[list[str], list[str]]:
    """Return the layers of isolation in words, and the optional ones that are missing."""
    layers, missing = [user, "bubblewrap: private namespaces, read-only files", "resource limits"], []
    if host.spawner.has_seccomp:
        layers.append("seccomp")
    else:
        missing.append(f"no seccomp filter for {platform.machine()}")
    if not host.has_nproc_per_box:
        missing.append("this kernel counts processes per user only; the watchdog counts those of each box")
    layers.append("memory cgroup" if host.cgroups else "memory watchdog")
    if not host.cgroups:
        missing.append("no memory cgroup is delegated to this process; the watchdog enforces the limit")
    return layers, missing


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
        wire.sendall(encode_frame({"number": 0, "kind": "refused", "why": str(error)}))
        return
    runner.host.poller.listen(parent_fd, runner.shut_down)
    runner.host.send({"number": 0, "kind": "ready", **runner.info})
    for order, blobs in frames[1:]:
        runner.handle_order(order, blobs)
    runner.run()
