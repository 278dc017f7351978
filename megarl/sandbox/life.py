"""One box, from its first process to its last: what it is given, what it says, when it has had enough."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from megarl.sandbox import mounts, watching
from megarl.sandbox.cgroups import Cgroups
from megarl.sandbox.cut import Cut
from megarl.sandbox.ends import Ends
from megarl.sandbox.given import put, take
from megarl.sandbox.spawning import CHANNEL, Bare, Spawner, confine

_FLOOD = 64
"""A session that prints so many times what is kept of it is ended, for to read it takes our time."""
_SETTING_UP_S = 60.0
_PIECE = 1 << 16
_LATER = 3600.0


class Home(Protocol):
    """Where boxes live."""

    place: str
    spawner: Spawner | Bare
    cgroups: Cgroups | None
    cores: int
    ends: Ends

    def answer(self, said: dict[str, Any], blobs: Sequence[bytes]) -> None: ...
    def rests(self, box: Box) -> None: ...
    def ended(self, box: Box) -> None: ...


class Box:
    """Of one order: a command with its files, or a session that is called again and again."""

    def __init__(self, home: Home, order: dict[str, Any], blobs: Sequence[bytes]) -> None:
        self.number: int = order["number"]
        self.outer = 0
        """The process that was started for it, which is ours to reap; 0 before."""
        self.dead = False
        self._home, self._order, self._limits, self._blobs = home, order, order["limits"], blobs
        self._session: bool = order["session"]
        self._most = int(self._limits["output_bytes"])
        self._memory = int(self._limits["memory_mb"]) << 20
        self._folder = f"{home.place}/boxes/{self.number}"
        self._ends: dict[int, int] = {}  # by their number in the box
        self._outputs = {number: Cut(self._most) for number in (1, 2, CHANNEL)}
        self._line = bytearray()
        self._first, self._first_handle, self._status_end, self._gate = 0, -1, -1, -1
        self._status_text = b""
        self._group = ""
        self._status: int | None = None
        self._reason = self._fault = ""
        self._outer_code = 0
        self._running = True
        self._seconds = float(self._limits["seconds"])
        self._began = time.monotonic()
        self._deadline = self._began + _SETTING_UP_S
        self._look_at = self._deadline

    def start(self) -> None:
        """Raises OSError; what there is of it then goes with `finish`."""
        spawner, (stdin, channel, *contents) = self._home.spawner, self._blobs
        self._blobs = ()
        self._began = time.monotonic()
        self._deadline = self._look_at = self._began + _SETTING_UP_S
        os.mkdir(self._folder, 0o700)
        if spawner.boxed:
            room = (int(self._limits["disk_mb"]) << 20) + _PIECE
            mounts.new_files(self._folder, room, int(self._limits["files"]) + 8)
        for name in ("tmp", "shm"):
            os.mkdir(f"{self._folder}/{name}", 0o700)
        for name, content in zip(self._order["files"], contents, strict=True):
            put(f"{self._folder}/tmp", name, content)
        theirs: dict[int, int] = {}
        try:
            theirs[0], ours = os.pipe2(os.O_CLOEXEC)
            self._home.ends.send(ours, stdin, last=True)
            for number in (1, 2):
                self._ends[number], theirs[number] = os.pipe2(os.O_CLOEXEC)
            if self._order["channel"]:
                near, far = socket.socketpair()
                self._ends[CHANNEL], theirs[CHANNEL] = near.detach(), far.detach()
            for number, end in self._ends.items():
                self._home.ends.listen(end, partial(self._hear, number))
            if channel:
                self._home.ends.send(self._ends[CHANNEL], channel)
            self.outer, self._status_end, self._gate = spawner.start(self._order["command"], self._folder, theirs)
        finally:
            for end in theirs.values():
                os.close(end)
        if spawner.boxed:
            self._home.ends.listen(self._status_end, self._hear_status)
        else:
            self._begin(self.outer)

    def call(self, seconds: float, data: bytes) -> None:
        """Give a session something to run; `start` it if it is new. Raises OSError as that."""
        self._seconds = seconds
        if not self.outer:
            self.start()
        else:
            self._outputs = {number: Cut(self._most) for number in self._outputs}
            self._set_off()
            watching.go_on(self._first)
        self._home.ends.send(self._ends[CHANNEL], data)

    def look(self, now: float) -> float:
        """Whether it has had enough; when to look again."""
        if not self._running or self._reason:
            return now + _LATER
        if now >= self._deadline:
            self.end("time")
        elif now >= self._look_at:
            files = self._folder if self._home.spawner.boxed else None
            size = watching.used(self._first, files)
            if size > self._memory:
                size = watching.used_exactly(self._first, files)
            if size > self._memory:
                self.end("memory")
            self._look_at = now + watching.next_look(size, self._memory, self._home.cores)
        return min(self._deadline, self._look_at)

    def end(self, reason: str) -> None:
        """Kill all that is in it; the rest follows when they are gone."""
        self._reason = self._reason or reason
        with contextlib.suppress(ProcessLookupError):
            if not self._home.spawner.boxed:
                os.killpg(self.outer, signal.SIGKILL)
            elif self._first_handle >= 0:
                signal.pidfd_send_signal(self._first_handle, signal.SIGKILL)
            elif self.outer:
                os.kill(self.outer, signal.SIGKILL)

    def left(self, status: int) -> None:
        """The outer process has ended; wait for the first one in the box, with which all others go."""
        self._outer_code = os.waitstatus_to_exitcode(status)
        if self._status_end >= 0:
            self._hear_status()
        self.end("")
        if self._first_handle >= 0:
            self._home.ends.listen(self._first_handle, self.finish)
        else:
            self.finish()

    def finish(self, failure: str = "") -> None:
        """Nothing runs in it any more: say what has come of it, and leave nothing."""
        if self.dead:
            return
        self.dead = True
        for number in tuple(self._ends):
            self._read(number)
        if self._group and self._home.cgroups and self._home.cgroups.leave(self._group):
            self._reason = "memory"
        failure = failure or self._judged()
        files = take(f"{self._folder}/tmp", self._order["fetch"], 16 * self._most)
        self._answer({"kind": "ended", "files": list(files), "failure": failure}, list(files.values()))
        for end in (*self._ends.values(), self._status_end, self._first_handle):
            if end >= 0:
                self._home.ends.close(end)
        if self._gate >= 0:
            os.close(self._gate)
        if self._home.spawner.boxed:
            with contextlib.suppress(OSError):
                mounts.unmount(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._home.ended(self)

    def _judged(self) -> str:
        """Why there was no box, if there was none."""
        if not self._home.spawner.boxed:
            self._status = self._outer_code
        elif self._status is None and not self._reason:
            said = self._outputs[2].value().decode(errors="replace").strip()
            if self._outer_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
                self._reason = "memory"  # the kernel's choice of what to end, for nobody else has
            elif said.startswith("bwrap: execvp "):
                self._status = 127
            else:
                return self._fault or said or "bubblewrap has started nothing, and says nothing of why"
        if self._reason:
            self._status = None
        elif self._status:
            self._reason = "signal" if self._status < 0 else "exit"
        return ""

    def _begin(self, first: int) -> None:
        """The first process is there, and its limits; from here on, time counts."""
        try:
            self._first_handle = os.pidfd_open(first)
            confine(first, self._limits, self._memory, self._session)
            if self._home.cgroups:
                self._group = self._home.cgroups.join(first, self._memory)
        except OSError as error:  # ended as soon as it had begun
            self._fault = str(error)
            self.end("")
            return
        self._first = first
        if self._gate >= 0:
            os.write(self._gate, b"\n")
        self._set_off()

    def _set_off(self) -> None:
        self._running, self._began = True, time.monotonic()
        self._deadline, self._look_at = self._began + self._seconds, self._began + watching.SOONEST

    def _hear_status(self) -> None:
        try:
            piece = os.read(self._status_end, _PIECE)
        except BlockingIOError:
            return
        self._status_text += piece
        *lines, self._status_text = self._status_text.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "child-pid" in said:
                self._begin(said["child-pid"])
            elif "exit-code" in said:
                code = said["exit-code"]
                self._status = code if code <= 128 or code > 192 else 128 - code
        if not piece:
            self._home.ends.close(self._status_end)
            self._status_end = -1

    def _hear(self, number: int) -> None:
        if self._read(number):
            return
        self._home.ends.close(self._ends.pop(number))
        if number == CHANNEL and self._session:
            self.end("exit")

    def _read(self, number: int) -> bool:
        """All that there is; whether there may be more."""
        kept = self._outputs[number]
        most = self._most if not self._session else _FLOOD * self._most
        while kept.total <= most:
            try:
                piece = os.read(self._ends[number], _PIECE)
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
        line, _, rest = bytes(self._line).partition(b"\n")
        self._line = bytearray(rest)
        if not self._running or self._reason:
            return  # what code has forged while none of it was to run
        for number in (1, 2):
            if number in self._ends:
                self._read(number)
        self._answer({"kind": "called"}, [line])
        self._running = False
        watching.halt(self._first)  # nobody watches it until the next call
        self._home.rests(self)

    def _answer(self, said: dict[str, Any], blobs: Sequence[bytes]) -> None:
        about = {"number": self.number, "status": self._status, "reason": self._reason}
        outputs = [self._outputs[number].value() for number in (1, 2, CHANNEL)]
        seconds = time.monotonic() - self._began
        self._home.answer({**about, **said, "seconds": seconds}, [*outputs, *blobs])
