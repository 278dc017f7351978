"""The rank's side of processes that run somebody else's code; for one event loop. Nothing here waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.processes.messages import MAX_BYTES, encode_order, read_frame
from megarl.processes.process_limits import ProcessLimits, clean_environment

LOAD_LIMIT_S = 120.0
"""How long the user's modules may take to be imported."""
_END_LIMIT_S = 8.0
_EXIT_STATUS_TIMEOUT_S = 2.0
"""How long it may take to hear how a process has ended that is gone."""


class WorkerUnavailable(OSError):
    """A process could not be had, or has ended; in words that can follow the name of a function. loading: what it was
    loading, where it has said so."""

    def __init__(self, words: str, loading: str = "") -> None:
        super().__init__(words)
        self.loading = loading


class _WorkerExited(Exception):
    """The process has, which was to answer."""


class ForkServer:
    """Where processes come from, see `forkserver.py`; started when the first is asked for, and again where it was lost.

    serve: `module:name` of what is called in each, as `serve(wire, given, order)`. given: the same for all, as JSON has
    it; modules that it names as `preload` are imported once, before any is forked. log: a file for what they print.
    """

    def __init__(self, serve: str, given: Mapping[str, Any], log: Path, limits: ProcessLimits) -> None:
        self._arguments = [serve, json.dumps({**given, "memory_mb": limits.memory_mb})]
        self._log, self._limits = log, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._listening: asyncio.Task[None] | None = None
        self._exit_statuses: dict[int, asyncio.Future[int]] = {}
        self._count = 0

    async def start_worker(self, order: Mapping[str, Any]) -> WorkerProcess:
        """A new one, which has loaded what its order says. Raises Gone where there is none to be had."""
        self._count += 1
        number, end = self._count, asyncio.get_running_loop().create_future()
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                orders = self._start()
                self._exit_statuses[number] = end
                said = json.dumps({"number": number, "order": order}).encode()
                socket.send_fds(orders, [said], [theirs.fileno()])
            ours.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=ours)
        except OSError as error:
            raise WorkerUnavailable(f"no process could be started for it: {error}") from None
        process = WorkerProcess(reader, writer, end)
        await process.load()
        return process

    def _start(self) -> socket.socket:
        """The socket for orders. Raises OSError."""
        if self._socket is not None and self._listening is not None and not self._listening.done():
            return self._socket
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "megarl.processes.forkserver", str(theirs.fileno()), str(os.getpid())]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the rank
                env=clean_environment(self._limits.pass_env),
            )
        ours.setblocking(False)
        self._socket, self._listening = ours, asyncio.create_task(self._listen(ours))
        return ours

    async def _listen(self, orders: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while said := await loop.sock_recv(orders, 4096):
                about = json.loads(said)
                end = self._exit_statuses.pop(about["number"], None)
                if end is not None and not end.done():
                    end.set_result(about["status"])

    def close(self) -> None:
        """End it, and with it all that it has forked. Blocks for some seconds at most."""
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
    """Answers orders; those that it has been given at the same time come back in any order. Made by a `ForkServer`.

    said: what it said when it was ready.
    """

    ready_message: Any = None

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: asyncio.Future[int]) -> None:
        self._reader, self._writer, self._status = reader, writer, status
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._listening: asyncio.Task[None] | None = None
        self._has_exited = False

    async def load(self) -> None:
        """Wait until it is ready. Raises Gone where it does not come to that."""
        said: dict[str, Any] = {"loading": ""}
        loading = ""
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                while "loading" in said:
                    loading = str(said["loading"])
                    said = dict(json.loads(await read_frame(self._reader, MAX_BYTES)))
        except TimeoutError:
            self.end()
            late = f"was not loaded in another process after {LOAD_LIMIT_S:g} s"
            raise WorkerUnavailable(f"{loading or 'its module'} {late}", loading) from None
        except (asyncio.IncompleteReadError, OSError, ValueError, TypeError):
            self.end()
            what = f"loading {loading or 'its module'} in another process"
            raise WorkerUnavailable(f"{what}, {await self.describe_exit()}", loading) from None
        except BaseException:
            self.end()
            raise
        if "ready" not in said:
            self.end()
            raise WorkerUnavailable(f"another process could not load it: {said.get('error')}")
        self.ready_message = said["ready"]
        self._listening = asyncio.create_task(self._listen())

    @property
    def is_alive(self) -> bool:
        return not self._has_exited

    async def request(self, order: bytes, limit: float) -> dict[str, Any]:
        """What is answered to an order. Raises Gone where the process has ended meanwhile, TimeoutError where there is
        no answer in time: then it is still at it, and is to be ended."""
        if self._has_exited:
            raise WorkerUnavailable(await self.describe_exit())
        self._count += 1
        number = self._count
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        self._writer.write(encode_order(number, order))
        try:
            async with asyncio.timeout(limit):
                return dict(await answer)
        except _WorkerExited:
            raise WorkerUnavailable(await self.describe_exit()) from None
        finally:
            self._pending.pop(number, None)

    async def describe_exit(self) -> str:
        """How it has ended, in words."""
        try:
            async with asyncio.timeout(_EXIT_STATUS_TIMEOUT_S):
                status = await asyncio.shield(self._status)
        except TimeoutError:
            return "its process ended"
        if status > 128 and status - 128 in signal.valid_signals():
            name = signal.Signals(status - 128).name
            return f"its process was ended by {name}" + (", maybe for want of memory" if name == "SIGKILL" else "")
        return f"its process ended with exit status {status}"

    async def _listen(self) -> None:
        try:
            while True:
                said = json.loads(await read_frame(self._reader, MAX_BYTES))
                if (answer := self._pending.get(said["number"])) is not None and not answer.done():
                    answer.set_result(said)
        except (asyncio.IncompleteReadError, OSError, ValueError, LookupError, TypeError):
            pass
        finally:
            self.end()

    def end(self) -> None:
        """Have it killed with whatever its functions have started."""
        self._has_exited = True
        self._writer.transport.abort()  # without waiting until it has read what was sent
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(_WorkerExited())
