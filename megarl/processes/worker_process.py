"""The rank's side of worker processes for user code, and pools of them, for one event loop. Every wait is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.processes.children import ProcessLimits, clean_environment
from megarl.processes.messages import MAX_BYTES, encode_frame, read_frame

LOAD_LIMIT_S = 120.0
"""Seconds that importing the user's modules may take."""
_END_LIMIT_S = 8.0
_EXIT_STATUS_TIMEOUT_S = 2.0
"""Seconds to wait for the exit status of a process that has ended."""


class WorkerUnavailable(OSError):
    """A worker process could not start or has exited; the message can follow a name. loading: what it was loading."""

    def __init__(self, message: str, loading: str = "") -> None:
        super().__init__(message)
        self.loading = loading


_READ_ERRORS = (asyncio.IncompleteReadError, OSError, ValueError, LookupError, TypeError)


class _WorkerExited(Exception):
    """The process that should respond has exited."""


class ForkServer:
    """Start worker processes through `forkserver.py`, which is started on first use and restarted after it has died.

    serve: `module:name`, a `forkserver.ServeFunction`. shared_args: JSON data for all workers; modules listed in its
    `preload` are imported once, before any fork. log: file for the workers' output.
    """

    def __init__(self, serve: str, shared_args: Mapping[str, Any], log: Path, limits: ProcessLimits) -> None:
        self._arguments = [serve, json.dumps({**shared_args, "memory_mb": limits.memory_mb})]
        self._log, self._limits = log, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._listening: asyncio.Task[None] | None = None
        self._exit_statuses: dict[int, asyncio.Future[int]] = {}
        self._count = 0

    async def start_worker(self, order: Mapping[str, Any]) -> WorkerProcess:
        """Start a worker and wait until it has loaded what its order names. Raises WorkerUnavailable if it cannot."""
        self._count += 1
        number, exit_status = self._count, asyncio.get_running_loop().create_future()
        try:
            local_end, remote_end = socket.socketpair()
            with remote_end:
                orders = self._start()
                self._exit_statuses[number] = exit_status
                message = json.dumps({"number": number, "order": order}).encode()
                socket.send_fds(orders, [message], [remote_end.fileno()])
            local_end.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=local_end)
        except OSError as error:
            raise WorkerUnavailable(f"could not start a process for it: {error}") from None
        process = WorkerProcess(reader, writer, exit_status)
        try:
            await process.load()
        except BaseException:
            process.end()
            raise
        return process

    def _start(self) -> socket.socket:
        """Return the socket for orders. Raises OSError."""
        if self._socket is not None and self._listening is not None and not self._listening.done():
            return self._socket
        self.close()
        local_end, remote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "megarl.processes.forkserver", str(remote_end.fileno()), str(os.getpid())]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with remote_end, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[remote_end.fileno()],
                start_new_session=True,  # only the rank handles Ctrl-C
                env=clean_environment(self._limits.pass_env),
            )
        local_end.setblocking(False)
        self._socket, self._listening = local_end, asyncio.create_task(self._listen(local_end))
        return local_end

    async def _listen(self, orders: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(orders, 4096):
                message = json.loads(data)
                exit_status = self._exit_statuses.pop(message["number"], None)
                if exit_status is not None and not exit_status.done():
                    exit_status.set_result(message["status"])

    def close(self) -> None:
        """End the fork server and all its workers. Blocks for a few seconds at most."""
        if self._listening is not None:
            self._listening.cancel()
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            try:
                self._process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._socket = self._listening = None


class WorkerProcess:
    """A worker process that answers requests, concurrent ones in any order. Created by a `ForkServer`."""

    ready_message: Any = None
    """The message by which it reported that it is ready."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: asyncio.Future[int]) -> None:
        self._reader, self._writer, self._status = reader, writer, status
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._listening: asyncio.Task[None] | None = None
        self.is_alive = True

    async def load(self) -> None:
        """Wait until the worker is ready. Raises WorkerUnavailable if it fails to load."""
        message: dict[str, Any] = {"loading": ""}
        loading = ""
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                while "loading" in message:
                    loading = str(message["loading"])
                    message, _ = await read_frame(self._reader, MAX_BYTES)
        except TimeoutError:
            problem = f"did not load in another process within {LOAD_LIMIT_S:g} s"
            raise WorkerUnavailable(f"{loading or 'its module'} {problem}", loading) from None
        except _READ_ERRORS:
            self.end()
            what = f"loading {loading or 'its module'} in another process"
            raise WorkerUnavailable(f"{what}, {await self.describe_exit()}", loading) from None
        if "ready" not in message:
            raise WorkerUnavailable(f"another process could not load it: {message.get('error')}")
        self.ready_message = message["ready"]
        self._listening = asyncio.create_task(self._listen())

    async def request(self, order: bytes, limit: float) -> dict[str, Any]:
        """Send a request and return the response. Raises WorkerUnavailable if the process has exited, TimeoutError if
        it does not respond in time; it is then still busy and should be ended."""
        if not self.is_alive:
            raise WorkerUnavailable(await self.describe_exit())
        self._count += 1
        number = self._count
        response = self._pending[number] = asyncio.get_running_loop().create_future()
        self._writer.write(encode_frame({"number": number}, [order]))
        try:
            async with asyncio.timeout(limit):
                return dict(await response)
        except _WorkerExited:
            raise WorkerUnavailable(await self.describe_exit()) from None
        finally:
            self._pending.pop(number, None)

    async def describe_exit(self) -> str:
        """Describe how the process ended."""
        try:
            async with asyncio.timeout(_EXIT_STATUS_TIMEOUT_S):
                status = await asyncio.shield(self._status)
        except TimeoutError:
            return "its process ended"
        if status > 128 and status - 128 in signal.valid_signals():
            name = signal.Signals(status - 128).name
            return f"its process was killed by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")
        return f"its process ended with exit status {status}"

    async def _listen(self) -> None:
        try:
            while True:
                message, _ = await read_frame(self._reader, MAX_BYTES)
                if (response := self._pending.get(message["number"])) is not None and not response.done():
                    response.set_result(message)
        except _READ_ERRORS:
            pass
        finally:
            self.end()

    def end(self) -> None:
        """Have the process killed, together with everything that its functions have started."""
        self.is_alive = False
        self._writer.transport.abort()  # do not wait for it to read what was sent
        for response in self._pending.values():
            if not response.done():
                response.set_exception(_WorkerExited())


class WorkerPool:
    """Worker processes of one kind, leased to callers in one event loop.

    A process starts only while someone waits, so that fast calls need few. Only when no other can start does a process
    serve several callers at a time.

    order: first order of each process. size: maximum number of processes. max_starting: maximum number that start
    concurrently. max_leases: maximum number of concurrent callers of a process.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        order: Mapping[str, Any],
        size: float = math.inf,
        max_starting: float = 1,
        max_leases: int = 1,
    ) -> None:
        self._fork_server, self._order = fork_server, order
        self._size, self._max_starting, self._max_leases = size, max_starting, max_leases
        self._leases: dict[WorkerProcess, int] = {}  # number of callers; the process that was released last comes last
        self._waiting: list[asyncio.Future[WorkerProcess]] = []
        self._starting: set[asyncio.Task[None]] = set()

    async def acquire(self) -> WorkerProcess:
        """Lease a process. Raises WorkerUnavailable if none can be started."""
        lease = asyncio.get_running_loop().create_future()
        self._waiting.append(lease)
        self._assign()
        try:
            return await lease
        except asyncio.CancelledError:
            if not lease.cancelled() and lease.exception() is None:
                self.release(lease.result())
            raise

    def release(self, process: WorkerProcess) -> None:
        if process in self._leases:
            self._leases[process] = self._leases.pop(process) - 1
        self._assign()

    def kill(self, process: WorkerProcess) -> None:
        """Kill a process and all its children; a new one starts if someone waits."""
        self._leases.pop(process, None)
        process.end()
        self._assign()

    def close(self) -> None:
        for task in self._starting:
            task.cancel()
        for process in self._leases:
            process.end()

    def _assign(self) -> None:
        """Lease processes to those who wait, and start more."""
        self._leases = {process: count for process, count in self._leases.items() if process.is_alive}
        self._waiting = [lease for lease in self._waiting if not lease.done()]
        while self._waiting and (process := self._find_free()):
            self._leases[process] += 1
            self._waiting.pop(0).set_result(process)
        while len(self._starting) < min(self._max_starting, len(self._waiting), self._size - len(self._leases)):
            self._starting.add(asyncio.create_task(self._start()))

    def _find_free(self) -> WorkerProcess | None:
        """Return the process with the fewest callers, if it may have another one."""
        process = min(reversed(self._leases), key=lambda process: self._leases[process], default=None)
        if process is None or not self._leases[process]:
            return process
        can_start = self._starting or len(self._leases) < self._size
        return None if can_start or self._leases[process] >= self._max_leases else process

    async def _start(self) -> None:
        try:
            try:
                process = await self._fork_server.start_worker(self._order)
            except WorkerUnavailable:  # retry once: the fork server itself may have died
                process = await self._fork_server.start_worker(self._order)
            self._leases[process] = 0
        except WorkerUnavailable as error:
            if lease := next((lease for lease in self._waiting if not lease.done()), None):
                lease.set_exception(error)
        finally:
            self._starting -= {asyncio.current_task()}
        self._assign()
