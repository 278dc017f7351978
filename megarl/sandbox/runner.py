"""The process that starts boxes. It holds nothing worth stealing and ends with the process that started it.

    python -I -S -c "..." FD PARENT, as `runner_client.py` starts it

Its environment is empty and its only open file is the socket FD. The first message says what to set up, and the answer
says what it has become or why it cannot. Requests follow.

`Turns` bounds the number of boxes at once on a machine by locks on the bytes of a file, which the kernel releases when
a process dies.
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

from megarl.sandbox import mounts
from megarl.sandbox.box_process import Box
from megarl.sandbox.cgroups import Cgroups
from megarl.sandbox.namespace import Nest
from megarl.sandbox.poller import Ends
from megarl.sandbox.runner_messages import Frame, Unpacker, packed
from megarl.sandbox.spawning import Bare, Spawner, counts_by_box
from megarl.sandbox.warm_pool import Nests


class Turns:
    """Of all processes that have the same file open."""

    def __init__(self, path: str, count: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._free = set(range(count))
        self._last = os.getpid() % count  # not all begin at the same
        self._count = count

    def take(self) -> int | None:
        """A turn, to be given back; None where all are taken."""
        for i in range(self._count):
            number = (self._last + i) % self._count
            if number in self._free and self._lock(number, fcntl.F_WRLCK):
                self._free.remove(number)
                self._last = number
                return number
        return None

    def give_back(self, number: int) -> None:
        self._lock(number, fcntl.F_UNLCK)
        self._free.add(number)

    def _lock(self, number: int, kind: int) -> bool:
        """Of the open file, not of the process: two of one process stand in each other's way as well."""
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

    def __init__(self, wire: socket.socket, unpacker: Unpacker, setup: dict[str, Any]) -> None:
        self.ends = Ends()
        self.cores = os.cpu_count() or 1
        self.counted = counts_by_box() and not setup["old"]
        self.cgroups: Cgroups | None = None
        self.layers: list[str] = []
        self.missing: list[str] = []
        self.pid = os.getpid()
        """For those outside of its namespaces."""
        self._unpacker = unpacker
        self._boxes: dict[int, Box] = {}
        self._busy: dict[Box, int] = {}
        self._by_outer: dict[int, Nest] = {}
        self._waiting: deque[tuple[Box, Callable[[], None]]] = deque()
        self.place = setup["place"]
        mounts.private_folder(self.place)
        self._turns = Turns(f"{self.place}/turns", setup["processes"])
        self.spawner: Spawner | Bare
        if setup["bwrap"]:
            self._become_nobody(setup)
        else:
            self.spawner = Bare(setup["python"])
            self.place = tempfile.mkdtemp(prefix="boxes-", dir=self.place)
            os.mkdir(f"{self.place}/boxes")
        self.nests = Nests(self, setup["processes"])
        self._wire = wire.detach()
        self.ends.listen(self._wire, self._hear)

    def _become_nobody(self, setup: dict[str, Any]) -> None:
        self.cgroups = Cgroups.find() if setup["cgroups"] else None
        said, self.pid = mounts.enter(self.place, setup["python"], setup["packages"], self._hand_over)
        self.spawner = Spawner(setup["bwrap"], self.place, setup["python"])
        self.layers = [said, "bubblewrap: namespaces of its own, read-only files"]
        if self.spawner.filtered:
            self.layers.append("seccomp")
        else:
            self.missing.append(f"no seccomp filter for {platform.machine()}")
        self.layers.append("resource limits")
        if not self.counted:
            self.missing.append("this kernel counts a user's processes all alike, the watchdog counts those of a box")
        if self.cgroups:
            self.layers.append("memory cgroup")
        else:
            self.layers.append("memory watchdog")
            self.missing.append("no memory cgroup is lent to this process, the watchdog stands in")

    def _hand_over(self, user: int) -> None:
        if self.cgroups:
            self.cgroups.hand_over(user)

    def run(self) -> None:
        """Until the other end is closed."""
        children, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.ends.listen(children, lambda: self._reap(children))
        while True:
            now = time.monotonic()
            soonest = now + _LATEST_S
            while self._waiting and self._next():
                pass
            if self._waiting:
                soonest = now + _TRY_AGAIN_S
            for box in tuple(self._busy):
                soonest = min(soonest, box.look(now))
            soonest = min(soonest, self.nests.refill(now))
            self.ends.wait(soonest - time.monotonic())

    def answer(self, said: dict[str, Any], blobs: Sequence[bytes]) -> None:
        self.ends.send(self._wire, packed(said, blobs))

    def rests(self, box: Box) -> None:
        """A session's call is over."""
        self._turns.give_back(self._busy.pop(box))

    def started(self, nest: Nest) -> None:
        self._by_outer[nest.outer] = nest

    def removed(self, nest: Nest) -> None:
        if self._by_outer.get(nest.outer) is nest:
            del self._by_outer[nest.outer]

    def ended(self, box: Box) -> None:
        self._boxes.pop(box.number, None)
        if box in self._busy:
            self._turns.give_back(self._busy.pop(box))

    def _hear(self) -> None:
        try:
            piece = os.read(self._wire, _PIECE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self.leave()
        for order, blobs in self._unpacker.feed(piece):
            self.take(order, blobs)

    def take(self, order: dict[str, Any], blobs: list[bytes]) -> None:
        number, kind = order["number"], order["kind"]
        if kind in ("run", "open"):
            box = self._boxes[number] = Box(self, order, blobs)
            if kind == "run":
                self._waiting.append((box, box.start))
        elif (known := self._boxes.get(number)) is None:
            if kind == "call":
                lost = {"number": number, "kind": "ended", "status": None, "reason": "exit", "seconds": 0.0}
                self.answer({**lost, "files": [], "refused": {}, "failure": ""}, [b"", b"", b""])
        elif kind == "call":
            self._waiting.append((known, lambda: known.call(order["seconds"], blobs[0])))
        else:
            self._end(known)

    def _end(self, box: Box) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not box)
        if box.begun:
            box.end("closed")
        else:
            self.ended(box)

    def _next(self) -> bool:
        """Give the first one that waits its turn; whether there was one."""
        turn = self._turns.take()
        if turn is None:
            return False
        box, begin = self._waiting.popleft()
        self._busy[box] = turn
        if box.dead:
            self.ended(box)
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
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if nest := self._by_outer.pop(ended[0], None):
                    nest.left(ended[1])

    def leave(self) -> None:
        """Each box ends with its bubblewrap, and that with this process."""
        self.nests.end()
        for box in tuple(self._boxes.values()):
            box.end("closed")
        if not self.spawner.boxed:
            shutil.rmtree(self.place, ignore_errors=True)
        os._exit(0)


def main(wire: socket.socket, parent: int) -> None:
    """Serve until the other end of the wire is closed, or the parent has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, _nothing)  # whoever started us says when it is over
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    wire.set_inheritable(False)
    mounts.inherit_orphans()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a session has five, and there may be hundreds
    unpacker = Unpacker()
    found: list[Frame] = []
    while not found:
        piece = wire.recv(_PIECE)
        if not piece:
            return
        found = unpacker.feed(piece)
    handle = os.pidfd_open(parent)
    try:
        runner = Runner(wire, unpacker, found[0][0])
    except OSError as error:
        wire.sendall(packed({"kind": "refused", "why": str(error)}))
        return
    runner.ends.listen(handle, runner.leave)
    runner.answer({"kind": "ready", "pid": runner.pid, "layers": runner.layers, "missing": runner.missing}, ())
    for order, blobs in found[1:]:
        runner.take(order, blobs)
    runner.run()


def _nothing(number: int, frame: object) -> None:
    """Not SIG_IGN, which the programs in the boxes would inherit."""
