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
from megarl.sandbox.file_transfer import fetch_files, write_file
from megarl.sandbox.namespace import BoxNamespace, BoxSpec
from megarl.sandbox.namespace import NamespaceHost as NestsHome
from megarl.sandbox.spawning import CHANNEL, set_limits
from megarl.sandbox.warm_pool import WarmPool


class TruncatedOutput:
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
_IDLE_CHECK_S = 3600.0


class BoxHost(NestsHome, Protocol):
    """Where boxes live."""

    warm_pool: WarmPool
    cores: int
    has_nproc_per_box: bool

    def send(self, said: dict[str, Any], blobs: Sequence[bytes]) -> None: ...
    def on_call_finished(self, box: Box) -> None: ...
    def on_box_ended(self, box: Box) -> None: ...


class Box:
    """Of one order: a command with its files, or a session that is called again and again."""

    def __init__(self, home: BoxHost, order: dict[str, Any], blobs: Sequence[bytes]) -> None:
        self.number: int = order["number"]
        self.has_started = False
        """Whether there is a process of its own."""
        self.is_finished = False
        self._host, self._order, self._limits, self._blobs = home, order, order["limits"], blobs
        self._is_session: bool = order["session"]
        self._max_output = int(self._limits["output_bytes"])
        self._memory = int(self._limits["memory_mb"]) << 20
        self._namespace: BoxNamespace | None = None
        self._outputs = {number: TruncatedOutput(self._max_output) for number in (1, 2, CHANNEL)}
        self._call_line = bytearray()
        self._status: int | None = None
        self._reason = self._fault = ""
        self._is_running = True
        self._seconds = float(self._limits["seconds"])
        self._began = time.monotonic()
        self._deadline = self._began + _SETTING_UP_S
        self._next_check = self._deadline

    def start(self) -> None:
        """Raises OSError and ValueError; what there is of it then goes with `fail`."""
        stdin, channel, *contents = self._blobs
        self._blobs = ()
        self._began = time.monotonic()
        self._deadline = self._next_check = self._began + _SETTING_UP_S
        form = BoxSpec(tuple(self._order["command"]), self._order["channel"], self._memory)
        nest = self._host.warm_pool.take(form, int(self._limits["disk_mb"]), int(self._limits["files"]))
        self._namespace, self.has_started = nest, True
        nest.on_started, nest.on_exited = self._on_started, self.finish
        for name, content in zip(self._order["files"], contents, strict=True):
            write_file(f"{nest.folder}/tmp", name, content)
        for number, end in nest.fds.items():
            self._host.poller.listen(end, partial(self._on_readable, number))
        nest.write_stdin(stdin)
        if channel:
            self._host.poller.send(nest.fds[CHANNEL], channel)
        if nest.init_pid:
            self._on_started()

    def call(self, seconds: float, data: bytes) -> None:
        """Give a session something to run; `start` it if it is new. Raises OSError as that."""
        self._seconds = seconds
        if self._namespace is None:
            self.start()
        else:
            self._outputs = {number: TruncatedOutput(self._max_output) for number in self._outputs}
            self._start_clock()
            memory_watch.resume_processes(self._namespace.init_pid)
        assert self._namespace is not None
        self._host.poller.send(self._namespace.fds[CHANNEL], data)

    def check_limits(self, now: float) -> float:
        """Whether it has had enough; when to look again."""
        nest = self._namespace
        if not self._is_running or self._reason or nest is None:
            return now + _IDLE_CHECK_S
        if now >= self._deadline:
            self.end("time")
        elif now >= self._next_check:
            files = nest.folder if self._host.spawner.is_boxed else None
            size = memory_watch.measure_memory(nest.init_pid, files)
            if size > self._memory:
                size = memory_watch.measure_exact(nest.init_pid, files)
            if size > self._memory:
                self.end("memory")
            self._next_check = now + memory_watch.compute_check_delay(size, self._memory, self._host.cores)
            if not self._host.has_nproc_per_box:  # a machine of old, on which only we count
                self._next_check = now + memory_watch.MIN_CHECK_S
                if len(memory_watch.list_descendants(nest.init_pid)) > int(self._limits["processes"]) + 1:
                    self.end("processes")
        return min(self._deadline, self._next_check)

    def end(self, reason: str) -> None:
        """Kill all that is in it; the rest follows when they are gone."""
        self._reason = self._reason or reason
        if self._namespace is not None:
            self._namespace.kill()

    def fail(self, why: str) -> None:
        """It could not be started: end what there is of it."""
        self._fault = why
        if self._namespace is not None:
            self._namespace.kill()
        else:
            self.finish()

    def finish(self) -> None:
        """Nothing runs in it any more: say what has come of it, and leave nothing."""
        if self.is_finished:
            return
        self.is_finished = True
        nest = self._namespace
        failure, files, refused = self._fault, dict[str, bytes](), dict[str, str]()
        if nest is not None:
            for number in tuple(nest.fds):
                self._read(number)
            if nest.was_oom_killed():
                self._reason = "memory"
            failure = failure or self._determine_failure(nest)
            files, refused = fetch_files(f"{nest.folder}/tmp", self._order["fetch"], 16 * self._max_output)
        said = {"kind": "ended", "files": list(files), "refused": refused, "failure": failure}
        self._answer(said, list(files.values()))
        if nest is not None:
            nest.remove()
        self._host.on_box_ended(self)

    def _determine_failure(self, nest: BoxNamespace) -> str:
        """Why there was no box, if there was none."""
        self._status = nest.status
        if not self._host.spawner.is_boxed:
            self._status = nest.bwrap_exit_code
        elif self._status is None and not self._reason:
            said = self._outputs[2].value().decode(errors="replace").strip()
            if nest.bwrap_exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
                self._reason = "memory"  # the kernel's choice of what to end, for nobody else has
            elif said.startswith("bwrap: execvp "):
                self._status = 127
            else:
                return nest.error or said or "bubblewrap has started nothing, and says nothing of why"
        if self._reason:
            self._status = None
        elif self._status:
            self._reason = "signal" if self._status < 0 else "exit"
        return ""

    def _on_started(self) -> None:
        """The first process is there: give it its limits; from here on, time counts."""
        assert self._namespace is not None
        if self._reason or self._fault:  # ended before
            self._namespace.kill()
            return
        try:
            counted = self._host.has_nproc_per_box and self._host.spawner.is_boxed
            set_limits(self._namespace.init_pid, self._limits, self._memory, self._is_session, counted)
            self._namespace.open_gate()
        except OSError as error:  # ended as soon as it had begun
            self._namespace.error = str(error)
            self.end("")
            return
        self._start_clock()

    def _start_clock(self) -> None:
        self._is_running, self._began = True, time.monotonic()
        self._deadline, self._next_check = self._began + self._seconds, self._began + memory_watch.MIN_CHECK_S

    def _on_readable(self, number: int) -> None:
        if self._read(number):
            return
        assert self._namespace is not None
        self._host.poller.close(self._namespace.fds.pop(number))
        if number == CHANNEL and self._is_session:
            self.end("exit")

    def _read(self, number: int) -> bool:
        """All that there is; whether there may be more."""
        assert self._namespace is not None
        kept, end = self._outputs[number], self._namespace.fds[number]
        most = self._max_output if not self._is_session else _FLOOD * self._max_output
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
            if number == CHANNEL and self._is_session:
                self._call_line += piece
                if b"\n" in piece:
                    self._finish_call()
                    return True
        self.end("output")
        return False

    def _finish_call(self) -> None:
        """A call is over: what it has printed is in the pipes."""
        assert self._namespace is not None
        line, _, rest = bytes(self._call_line).partition(b"\n")
        self._call_line = bytearray(rest)
        if not self._is_running or self._reason:
            return  # what code has forged while none of it was to run
        for number in (1, 2):
            if number in self._namespace.fds:
                self._read(number)
        self._answer({"kind": "called"}, [line])
        self._is_running = False
        memory_watch.stop_processes(self._namespace.init_pid)  # nobody watches it until the next call
        self._host.on_call_finished(self)

    def _answer(self, said: dict[str, Any], blobs: Sequence[bytes]) -> None:
        about = {"number": self.number, "status": self._status, "reason": self._reason}
        outputs = [self._outputs[number].value() for number in (1, 2, CHANNEL)]
        seconds = time.monotonic() - self._began
        self._host.send({**about, **said, "seconds": seconds}, [*outputs, *blobs])
