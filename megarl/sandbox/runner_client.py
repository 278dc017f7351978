"""Client of the process that starts boxes: starts it, sends orders, and matches responses to requests."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, SandboxConfig
from megarl.processes.messages import Frame, FrameDecoder, encode_frame
from megarl.sandbox.results import Result

_ROOT = Path(__file__).resolve().parents[2]
_START = """
import socket, sys
sys.path.insert(0, sys.argv[3])
from megarl.sandbox.runner import main
main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
"""
_PACKAGES = ("numpy", "sympy", "mpmath")
"""Packages in a box besides the standard library, if this interpreter has them."""
_READY_S = 60.0
_LOST = "the process that starts boxes exited; the next run starts a new one"
_PIECE = 1 << 20
REMEDY = (
    "install bubblewrap (apt install bubblewrap) and let unprivileged users create namespaces: "
    "sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, "
    "user.max_user_namespaces above 0; in Docker --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined; in Kubernetes seccompProfile Unconfined and procMount Unmasked. Or set "
    "sandbox.backend to the address of a service with SandboxFusion's API; megarl/sandbox/README.md has details"
)


class SandboxError(RuntimeError):
    """A box could not be created, or the process that creates boxes has exited. Never the fault of an answer."""


class RunnerClient:
    """Belongs to the process that created it, and to one event loop at a time."""

    def __init__(self, settings: SandboxConfig) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: socket.socket | None = None
        self._owner = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sending: asyncio.Lock | None = None
        self._decoder = FrameDecoder()
        self.numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self.runner_info: dict[str, Any] | None = None
        """The process's first message, as number 0: what isolates its boxes, or why it can start none."""

    async def connect(self) -> None:
        """Start the process if needed and attach it to this event loop.

        Raises ConfigError if boxes cannot work here.
        """
        loop = asyncio.get_running_loop()
        if self._wire is None or self._owner != os.getpid():
            self._start()
        if self._loop is not loop:
            assert self._wire is not None
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._wire)
            self._loop, self._sending, self._pending = loop, asyncio.Lock(), {}
            loop.add_reader(self._wire, self._on_readable)
        if self.runner_info is not None:
            info = self.runner_info
        else:
            greeting = self._pending.setdefault(0, loop.create_future())
            async with asyncio.timeout(_READY_S):
                info, _ = await asyncio.shield(greeting)
        if info["kind"] == "refused":
            self.close()
            raise ConfigError(
                f"sandbox.backend=bubblewrap does not work on this machine: {info['why']}. Remedy: {REMEDY}"
            )

    async def run(
        self,
        command: Sequence[str],
        files: Mapping[str, bytes],
        stdin: bytes,
        limits: Mapping[str, Any],
        fetch: Sequence[str],
        preamble: bytes = b"",
    ) -> tuple[Result, bytes]:
        """Run a command in a new box. Returns the result, and what it wrote to its private channel.

        preamble: first bytes on the channel; without it there is none.
        """
        await self.connect()
        order: dict[str, Any] = {"number": next(self.numbers), "kind": "run", "session": False, "limits": limits}
        order |= {"command": command, "channel": bool(preamble), "files": list(files), "fetch": list(fetch)}
        response, (stdout, stderr, channel, *contents) = await self.request(order, [stdin, preamble, *files.values()])
        fetched = dict(zip(response["files"], contents, strict=True))
        status, reason, seconds = response["status"], response["reason"], response["seconds"]
        is_ok = status == 0 and not reason
        return Result(is_ok, status, stdout, stderr, seconds, reason, fetched, response["refused"]), channel

    async def request(self, order: Mapping[str, Any], blobs: Sequence[bytes]) -> Frame:
        """Send an order and wait for its response. Cancelling this ends the box. Raises SandboxError."""
        number = order["number"]
        try:
            assert self._loop is not None
            self._pending[number] = future = self._loop.create_future()
            await self.send(order, blobs)
            response, contents = await future
        except asyncio.CancelledError:
            self._pending.pop(number, None)
            if self._wire is not None:
                asyncio.ensure_future(self.send({"number": number, "kind": "end"}, ()))
            raise
        if response.get("failure"):
            raise SandboxError(f"a box could not be created: {response['failure']}")
        return response, contents

    async def send(self, order: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        assert self._loop is not None and self._sending is not None
        async with self._sending:
            if self._wire is None:
                raise SandboxError("the sandbox was closed")
            try:
                await self._loop.sock_sendall(self._wire, encode_frame(order, blobs))
            except OSError as error:
                self.close(_LOST)
                raise SandboxError(f"the process that starts boxes exited: {error}") from None

    def close(self, reason: str = "the sandbox was closed") -> None:
        """End the process and with it all boxes. The next run starts another process.

        reason: error of the pending requests.
        """
        wire, process, self._wire, self._process, self.runner_info = self._wire, self._process, None, None, None
        if wire is not None:
            if self._loop is not None and not self._loop.is_closed() and self._owner == os.getpid():
                self._loop.remove_reader(wire)
            wire.close()
        if process is not None and self._owner == os.getpid():
            process.wait()
        self._loop = None
        futures, self._pending = self._pending, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(SandboxError(reason))

    def _start(self) -> None:
        bwrap = ""
        if self._settings.backend == "bubblewrap":
            bwrap = shutil.which("bwrap", path="/usr/bin:/usr/local/bin:/bin:" + os.environ.get("PATH", "")) or ""
            if not bwrap:
                raise ConfigError(f"sandbox.backend=bubblewrap: bwrap is not installed. Remedy: {REMEDY}")
        client_socket, runner_socket = socket.socketpair()
        with runner_socket:
            # The base interpreter, not this virtual environment: none of its packages may appear in the box.
            base_python = str(getattr(sys, "_base_executable", sys.executable))
            self._process = subprocess.Popen(
                [base_python, "-I", "-S", "-c", _START, str(runner_socket.fileno()), str(os.getpid()), str(_ROOT)],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[runner_socket.fileno()],
                cwd="/",
                start_new_session=True,
            )
        specs = [importlib.util.find_spec(name) for name in _PACKAGES]
        packages = [os.path.dirname(spec.origin) for spec in specs if spec is not None and spec.origin]
        packages += [f"{folder}.libs" for folder in packages if os.path.isdir(f"{folder}.libs")]
        setup = {
            "root": f"/tmp/megarl-sandbox-{os.getuid()}",
            "processes": self._settings.max_boxes,
            "bwrap": bwrap,
            "python": os.path.realpath(sys.base_prefix),
            "packages": packages,
        }
        client_socket.sendall(encode_frame(setup))
        client_socket.setblocking(False)
        self._wire, self._owner, self._loop, self.runner_info = client_socket, os.getpid(), None, None
        self._decoder, self._pending = FrameDecoder(), {}

    def _on_readable(self) -> None:
        assert self._wire is not None
        try:
            piece = self._wire.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self.close(_LOST)
            return
        for message, blobs in self._decoder.feed(piece):
            if message["number"] == 0:
                self.runner_info = message
            future = self._pending.pop(message["number"], None)
            if future is not None and not future.done():
                future.set_result((message, blobs))
