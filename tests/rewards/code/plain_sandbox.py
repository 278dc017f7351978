"""The sandbox's API on plain, unprotected processes, for harmless answers only.

Answers that crash, loop or attack need a real sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import SandboxConfig
from megarl.sandbox.box import Interpreter, Sandbox
from megarl.sandbox.results import HarnessResult, Limits, Output, Result

_SEND = """
import json as _json, os as _os
def send(number, value, _file=_os.fdopen(%d, "w", buffering=1)):
    _file.write(_json.dumps([number, value]) + "\\n")
    _file.flush()
"""
_SESSION = """
import io, json, os, sys, tempfile, traceback
orders, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
space = {"__name__": "__main__"}
for order in orders:
    output = tempfile.TemporaryFile()
    os.dup2(output.fileno(), 1)
    ok, error = True, ""
    try:
        exec(compile(json.loads(order), "<session>", "exec"), space)
    except BaseException:
        ok, error = False, traceback.format_exc()
    sys.stdout.flush()
    output.seek(0)
    replies.write(json.dumps([ok, output.read().decode(errors="replace"), error]) + "\\n")
    replies.flush()
"""


class PlainSession(Interpreter):
    def __init__(self, process: asyncio.subprocess.Process, seconds: float, folder: tempfile.TemporaryDirectory[str]):
        self.process, self.seconds, self.folder = process, seconds, folder

    async def run(self, code: str, seconds: float | None = None) -> Output:
        assert self.process.stdin and self.process.stdout
        started = time.monotonic()
        try:
            self.process.stdin.write(json.dumps(code).encode() + b"\n")
            line = await asyncio.wait_for(self.process.stdout.readline(), seconds or self.seconds)
            ok, out, error = json.loads(line)
        except TimeoutError:
            await self.close()
            return Output(False, "", "", seconds or self.seconds, "time")
        except (ValueError, OSError):
            return Output(False, "", "", time.monotonic() - started, "closed")
        return Output(ok, out, error, time.monotonic() - started, "" if ok else "exit")

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        self.folder.cleanup()


class PlainSandbox(Sandbox):
    """`seen` records everything sent into the sandbox."""

    def __init__(self) -> None:
        super().__init__(SandboxConfig(backend="none"))
        self.seen: list[str] = []

    async def run_harness(
        self,
        harness: str,
        count: int,
        files: Mapping[str, bytes] = {},
        stdin: bytes = b"",
        limits: Limits = Limits(),  # noqa: B008
    ) -> HarnessResult:
        self.seen += [harness, *(data.decode() for data in files.values()), stdin.decode()]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "stdin").write_bytes(stdin)
            reading, writing = os.pipe()
            with open(Path(folder) / "stdin", "rb") as stdin_file:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-c", _SEND % writing + harness),
                    cwd=folder,
                    pass_fds=(writing,),
                    stdin=stdin_file,
                    stdout=-3,
                    start_new_session=True,
                )
            os.close(writing)
            file = os.fdopen(reading, "rb")
            reader = asyncio.create_task(asyncio.to_thread(file.read))
            await asyncio.wait([reader], timeout=limits.seconds)
            with contextlib.suppress(ProcessLookupError):  # it may have exited already
                os.killpg(process.pid, signal.SIGKILL)
            status, text = await process.wait(), await reader
            file.close()
        lines = [json.loads(line) for line in text.splitlines()]
        results: dict[int, Any] = {}
        for number, value in lines:
            if (
                type(number) is int
                and 0 <= number < count
                and sum(output_number == number for output_number, _ in lines) == 1
            ):
                results[number] = value
        return HarnessResult(results, count, Result(status == 0, status, b"", b"", 0.0))

    async def interpreter(self, limits: Limits = Limits()) -> Interpreter:  # noqa: B008
        folder = tempfile.TemporaryDirectory()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", _SESSION), stdin=-1, stdout=-1, limit=limits.output_bytes, cwd=folder.name
        )
        return PlainSession(process, limits.seconds, folder)
