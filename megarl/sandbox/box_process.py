"""One box from its first process to its last: inputs, output, limits and end. Long output keeps its head and its
tail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from megarl.sandbox import memory_watch
from megarl.sandbox.file_transfer import put, take
from megarl.sandbox.namespace import Form, Nest
from megarl.sandbox.namespace import Home as NestsHome
from megarl.sandbox.spawning import CHANNEL, confine
from megarl.sandbox.warm_pool import Nests


class Cut:
    """At most `most` bytes of what is added, and a mark where some are left out."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[max(0, room) :]
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    def value(self) -> bytes:
        gone = self.total - len(self._head) - self._half
        if gone <= 0:
            return bytes(self._head + self._tail)
        return bytes(self._head) + b"\n... %d bytes left out ...\n" % gone + bytes(self._tail[-self._half :])


_FLOOD = 64
"""A session that prints so many times what is kept of it is ended, for to read it takes our time."""
_SETTING_UP_S = 60.0
_PIECE = 1 << 16
_LATER = 3600.0


class Home(NestsHome, Protocol):
    """Where boxes live."""

    nests: Nests
    cores: int
    counted: bool

    def answer(self, said: dict[str, Any], blobs: Sequence[bytes]) -> None: ...
    def rests(self, box: Box) -> None: ...
    def ended(self, box: Box) -> None: ...


class Box:
    """Of one order: a command with its files, or a session that is called again and again."""

    def __init__(self, home: Home, order: dict[str, Any], blobs: Sequence[bytes]) -> None:
        self.number: int = order["number"]
        self.begun = False
        """Whether there is a process of its own."""
        self.dead = False
        self._home, self._order, self._limits, self._blobs = home, order, order["limits"], blobs
        self._session: bool = order["session"]
        self._most = int(self._limits["output_bytes"])
        self._memory = int(self._limits["memory_mb"]) << 20
        self._nest: Nest | None = None
        self._outputs = {number: Cut(self._most) for number in (1, 2, CHANNEL)}
        self._line = bytearray()
        self._status: int | None = None
        self._reason = self._fault = ""
        self._running = True
        self._seconds = float(self._limits["seconds"])
        self._began = time.monotonic()
        self._deadline = self._began + _SETTING_UP_S
        self._look_at = self._deadline

    def start(self) -> None:
        """Raises OSError and ValueError; what there is of it then goes with `fail`."""
        stdin, channel, *contents = self._blobs
        self._blobs = ()
        self._began = time.monotonic()
        self._deadline = self._look_at = self._began + _SETTING_UP_S
        form = Form(tuple(self._order["command"]), self._order["channel"], self._memory)
        nest = self._home.nests.take(form, int(self._limits["disk_mb"]), int(self._limits["files"]))
        self._nest, self.begun = nest, True
        nest.come, nest.over = self._begin, self.finish
        for name, content in zip(self._order["files"], contents, strict=True):
            put(f"{nest.folder}/tmp", name, content)
        for number, end in nest.ends.items():
            self._home.ends.listen(end, partial(self._hear, number))
        nest.feed(stdin)
        if channel:
            self._home.ends.send(nest.ends[CHANNEL], channel)
        if nest.first:
            self._begin()

    def call(self, seconds: float, data: bytes) -> None:
        """Give a session something to run; `start` it if it is new. Raises OSError as that."""
        self._seconds = seconds
        if self._nest is None:
            self.start()
        else:
            self._outputs = {number: Cut(self._most) for number in self._outputs}
            self._set_off()
            memory_watch.go_on(self._nest.first)
        assert self._nest is not None
        self._home.ends.send(self._nest.ends[CHANNEL], data)

    def look(self, now: float) -> float:
        """Whether it has had enough; when to look again."""
        nest = self._nest
        if not self._running or self._reason or nest is None:
            return now + _LATER
        if now >= self._deadline:
            self.end("time")
        elif now >= self._look_at:
            files = nest.folder if self._home.spawner.boxed else None
            size = memory_watch.used(nest.first, files)
            if size > self._memory:
                size = memory_watch.used_exactly(nest.first, files)
            if size > self._memory:
                self.end("memory")
            self._look_at = now + memory_watch.next_look(size, self._memory, self._home.cores)
            if not self._home.counted:  # a machine of old, on which only we count
                self._look_at = now + memory_watch.SOONEST
                if len(memory_watch.family(nest.first)) > int(self._limits["processes"]) + 1:
                    self.end("processes")
        return min(self._deadline, self._look_at)

    def end(self, reason: str) -> None:
        """Kill all that is in it; the rest follows when they are gone."""
        self._reason = self._reason or reason
        if self._nest is not None:
            self._nest.kill()

    def fail(self, why: str) -> None:
        """It could not be started: end what there is of it."""
        self._fault = why
        if self._nest is not None:
            self._nest.kill()
        else:
            self.finish()

    def finish(self) -> None:
        """Nothing runs in it any more: say what has come of it, and leave nothing."""
        if self.dead:
            return
        self.dead = True
        nest = self._nest
        failure, files, refused = self._fault, dict[str, bytes](), dict[str, str]()
        if nest is not None:
            for number in tuple(nest.ends):
                self._read(number)
            if nest.full():
                self._reason = "memory"
            failure = failure or self._judged(nest)
            files, refused = take(f"{nest.folder}/tmp", self._order["fetch"], 16 * self._most)
        said = {"kind": "ended", "files": list(files), "refused": refused, "failure": failure}
        self._answer(said, list(files.values()))
        if nest is not None:
            nest.remove()
        self._home.ended(self)

    def _judged(self, nest: Nest) -> str:
        """Why there was no box, if there was none."""
        self._status = nest.status
        if not self._home.spawner.boxed:
            self._status = nest.outer_code
        elif self._status is None and not self._reason:
            said = self._outputs[2].value().decode(errors="replace").strip()
            if nest.outer_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
                self._reason = "memory"  # the kernel's choice of what to end, for nobody else has
            elif said.startswith("bwrap: execvp "):
                self._status = 127
            else:
                return nest.fault or said or "bubblewrap has started nothing, and says nothing of why"
        if self._reason:
            self._status = None
        elif self._status:
            self._reason = "signal" if self._status < 0 else "exit"
        return ""

    def _begin(self) -> None:
        """The first process is there: give it its limits; from here on, time counts."""
        assert self._nest is not None
        if self._reason or self._fault:  # ended before
            self._nest.kill()
            return
        try:
            counted = self._home.counted and self._home.spawner.boxed
            confine(self._nest.first, self._limits, self._memory, self._session, counted)
            self._nest.open()
        except OSError as error:  # ended as soon as it had begun
            self._nest.fault = str(error)
            self.end("")
            return
        self._set_off()

    def _set_off(self) -> None:
        self._running, self._began = True, time.monotonic()
        self._deadline, self._look_at = self._began + self._seconds, self._began + memory_watch.SOONEST

    def _hear(self, number: int) -> None:
        if self._read(number):
            return
        assert self._nest is not None
        self._home.ends.close(self._nest.ends.pop(number))
        if number == CHANNEL and self._session:
            self.end("exit")

    def _read(self, number: int) -> bool:
        """All that there is; whether there may be more."""
        assert self._nest is not None
        kept, end = self._outputs[number], self._nest.ends[number]
        most = self._most if not self._session else _FLOOD * self._most
        while kept.total <= most:
            try:
                piece = os.read(end, _PIECE)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not piece:
                return False
            kept.add(piece)
            if number == CHANNEL and self._session:
                self._line += piece
                if b"\n" in piece:
                    self._called()
                    return True
        self.end("output")
        return False

    def _called(self) -> None:
        """A call is over: what it has printed is in the pipes."""
        assert self._nest is not None
        line, _, rest = bytes(self._line).partition(b"\n")
        self._line = bytearray(rest)
        if not self._running or self._reason:
            return  # what code has forged while none of it was to run
        for number in (1, 2):
            if number in self._nest.ends:
                self._read(number)
        self._answer({"kind": "called"}, [line])
        self._running = False
        memory_watch.halt(self._nest.first)  # nobody watches it until the next call
        self._home.rests(self)

    def _answer(self, said: dict[str, Any], blobs: Sequence[bytes]) -> None:
        about = {"number": self.number, "status": self._status, "reason": self._reason}
        outputs = [self._outputs[number].value() for number in (1, 2, CHANNEL)]
        seconds = time.monotonic() - self._began
        self._home.answer({**about, **said, "seconds": seconds}, [*outputs, *blobs])
