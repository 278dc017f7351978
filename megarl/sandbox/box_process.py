"""One box from its first process to its last: inputs, output, limits, and end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from megarl.sandbox.box_memory import (
    MIN_CHECK_S,
    compute_check_delay,
    list_descendants,
    measure_exact,
    measure_memory,
    signal_processes,
    stop_processes,
)
from megarl.sandbox.file_transfer import fetch_files, write_file
from megarl.sandbox.namespace import BoxHost, BoxNamespace, BoxSpec, WarmPool
from megarl.sandbox.spawning import CHANNEL, set_limits


class TruncatedOutput:
    """Collect at most `max_bytes` bytes: long output keeps its head and its tail, with a marker between them."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max(1, max_bytes // 2)
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        head_room = self._half - len(self._head)
        self._head += data[:head_room]
        self._tail += data[head_room:]
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    def value(self) -> bytes:
        num_omitted = self.total - len(self._head) - self._half
        if num_omitted <= 0:
            return bytes(self._head + self._tail)
        return bytes(self._head) + b"\n... %d bytes left out ...\n" % num_omitted + bytes(self._tail[-self._half :])


_FLOOD = 64
"""A session that prints more than this multiple of its output limit is ended, because reading it costs us time."""
_SETTING_UP_S = 60.0
_PIECE = 1 << 16


class Box:
    """The box of one order: a command with its files, or a session that is called repeatedly."""

    def __init__(self, host: BoxHost, warm_pool: WarmPool, order: dict[str, Any], blobs: Sequence[bytes]) -> None:
        self.number: int = order["number"]
        self.is_running = True
        """Whether the box occupies a slot: always, except a session between its calls."""
        self.is_ending = self.is_finished = False
        self._host, self._warm_pool = host, warm_pool
        self._order, self._limits, self._blobs = order, order["limits"], blobs
        self._is_session: bool = order["session"]
        self._max_output = int(self._limits["output_bytes"])
        self._memory = int(self._limits["memory_mb"]) << 20
        self._namespace: BoxNamespace | None = None
        self._outputs = {number: TruncatedOutput(self._max_output) for number in (1, 2, CHANNEL)}
        self._call_line = bytearray()
        self._status: int | None = None
        self._reason = self._failure = ""
        self._seconds = float(self._limits["seconds"])
        self._next_check = self._deadline = 0.0
        self._start_clock(_SETTING_UP_S, first_check=_SETTING_UP_S)

    def start(self) -> None:
        """Start the box. Raises OSError or ValueError; then `end` cleans up."""
        stdin, channel, *contents = self._blobs
        self._blobs = ()
        self._start_clock(_SETTING_UP_S, first_check=_SETTING_UP_S)
        spec = BoxSpec(tuple(self._order["command"]), self._order["channel"], self._memory)
        namespace = self._warm_pool.take(spec, int(self._limits["disk_mb"]), int(self._limits["files"]))
        self._namespace = namespace
        namespace.on_started, namespace.on_exited = self._on_started, self._finish
        for name, content in zip(self._order["files"], contents, strict=True):
            write_file(f"{namespace.folder}/tmp", name, content)
        for number, fd in namespace.fds.items():
            self._host.poller.listen(fd, partial(self._on_readable, number))
        namespace.write_stdin(stdin)
        if channel:
            self._host.poller.send(namespace.fds[CHANNEL], channel)
        if namespace.init_pid:
            self._on_started()

    def call(self, seconds: float, data: bytes) -> None:
        """Run code in a session, starting the session if it is new. Raises OSError as `start` does."""
        self._seconds = seconds
        if self._namespace is None:
            self.start()
        else:
            self._outputs = {number: TruncatedOutput(self._max_output) for number in self._outputs}
            self.is_running = True
            self._start_clock(seconds)
            signal_processes(list_descendants(self._namespace.init_pid), signal.SIGCONT)
        assert self._namespace is not None
        self._host.poller.send(self._namespace.fds[CHANNEL], data)

    def check_limits(self, now: float) -> float:
        """End the box if it exceeds a limit. Returns the time of the next check."""
        namespace = self._namespace
        if not self.is_running or self._reason or namespace is None:
            return now + 3600.0
        if now >= self._deadline:
            self.end("time")
        elif now >= self._next_check:
            files = namespace.folder if self._host.spawner.is_boxed else None
            size = measure_memory(namespace.init_pid, files)
            if size > self._memory:
                size = measure_exact(namespace.init_pid, files)
            if size > self._memory:
                self.end("memory")
            self._next_check = now + compute_check_delay(size, self._memory)
            if not self._host.has_nproc_per_box:
                self._next_check = now + MIN_CHECK_S
                if len(list_descendants(namespace.init_pid)) > int(self._limits["processes"]) + 1:
                    self.end("processes")
        return min(self._deadline, self._next_check)

    def end(self, reason: str = "", failure: str = "") -> None:
        """Kill everything in the box, and report the outcome when the processes have ended.

        failure: why the box could not start.
        """
        self.is_ending = True
        self._reason, self._failure = self._reason or reason, self._failure or failure
        if self._namespace is not None:
            self._namespace.kill()
        else:
            self._finish()

    def _finish(self) -> None:
        """Report the outcome and remove the box, once nothing runs in it any more."""
        if self.is_finished:
            return
        self.is_ending = self.is_finished = True
        namespace = self._namespace
        files, refused = dict[str, bytes](), dict[str, str]()
        if namespace is not None:
            for number in tuple(namespace.fds):
                self._read(number)
            if namespace.was_oom_killed():
                self._reason = "memory"
            self._failure = self._failure or self._determine_failure(namespace)
            files, refused = fetch_files(f"{namespace.folder}/tmp", self._order["fetch"], 16 * self._max_output)
        message = {"kind": "ended", "files": list(files), "refused": refused, "failure": self._failure}
        self._answer(message, list(files.values()))
        if namespace is not None:
            namespace.remove()

    def _determine_failure(self, namespace: BoxNamespace) -> str:
        """Determine the exit status and reason. Returns why there was no box, empty if there was one."""
        self._status = namespace.status
        if not self._host.spawner.is_boxed:
            self._status = namespace.bwrap_exit_code
        elif self._status is None and not self._reason:
            stderr = self._outputs[2].value().decode(errors="replace").strip()
            if namespace.bwrap_exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
                self._reason = "memory"  # the kernel's OOM killer; nobody else kills it
            elif stderr.startswith("bwrap: execvp "):
                self._status = 127
            else:
                return namespace.error or stderr or "bubblewrap did not start, without an error message"
        if self._reason:
            self._status = None
        elif self._status:
            self._reason = "signal" if self._status < 0 else "exit"
        return ""

    def _on_started(self) -> None:
        """Set the limits of the first process and start the clock."""
        assert self._namespace is not None
        if self._reason or self._failure:  # ended before it started
            self._namespace.kill()
            return
        try:
            counted = self._host.has_nproc_per_box and self._host.spawner.is_boxed
            set_limits(self._namespace.init_pid, self._limits, self._memory, self._is_session, counted)
            self._namespace.open_gate()
        except OSError as error:  # ended right after it started
            self._namespace.error = str(error)
            self.end()
            return
        self._start_clock(self._seconds)

    def _start_clock(self, seconds: float, first_check: float = MIN_CHECK_S) -> None:
        self._began = time.monotonic()
        self._deadline, self._next_check = self._began + seconds, self._began + first_check

    def _on_readable(self, number: int) -> None:
        if self._read(number):
            return
        assert self._namespace is not None
        self._host.poller.close(self._namespace.fds.pop(number))
        if number == CHANNEL and self._is_session:
            self.end("exit")

    def _read(self, number: int) -> bool:
        """Read all available output. Returns whether more may come."""
        assert self._namespace is not None
        output, fd = self._outputs[number], self._namespace.fds[number]
        limit = self._max_output if not self._is_session else _FLOOD * self._max_output
        while output.total <= limit:
            try:
                piece = os.read(fd, _PIECE)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not piece:
                return False
            output.add(piece)
            if number == CHANNEL and self._is_session:
                self._call_line += piece
                if b"\n" in piece:
                    self._finish_call()
                    return True
        self.end("output")
        return False

    def _finish_call(self) -> None:
        """Report a finished call, with its output that is still in the pipes."""
        assert self._namespace is not None
        line, _, rest = bytes(self._call_line).partition(b"\n")
        self._call_line = bytearray(rest)
        if not self.is_running or self._reason:
            return  # forged by code that should not be running
        for number in (1, 2):
            if number in self._namespace.fds:
                self._read(number)
        self._answer({"kind": "called"}, [line])
        self.is_running = False
        stop_processes(self._namespace.init_pid)  # no watchdog until the next call

    def _answer(self, message: dict[str, Any], blobs: Sequence[bytes]) -> None:
        header = {"number": self.number, "status": self._status, "reason": self._reason}
        outputs = [self._outputs[number].value() for number in (1, 2, CHANNEL)]
        seconds = time.monotonic() - self._began
        self._host.send({**header, **message, "seconds": seconds}, [*outputs, *blobs])
