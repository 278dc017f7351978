"""A rank's view of one tool process, see `tool_process.py`: its start, a call, its end. Nothing here waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

LOAD_LIMIT_S = 120.0
"""How long the tools' modules may take to be imported."""
_END_LIMIT_S = 8.0
_LINE = 1 << 20  # bytes of an answer: what a tool may say, each character escaped, and a traceback
_TAIL = 4096  # bytes of stderr that are kept


def _command(specs: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "megarl.rollout.tool_process", str(os.getpid()), *specs]


def _environment() -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))


@functools.cache
def describe(specs: tuple[str, ...]) -> dict[str, Any]:
    """What a tool process says of these tools: {"tools": [{"spec", "schema"}]} or {"error"}. They are loaded there, not
    here: whatever a module does while it is imported, this process does not import it."""
    process = subprocess.Popen(
        _command(specs),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=_environment(),
    )
    late = False
    try:
        out, err = process.communicate(timeout=LOAD_LIMIT_S)
    except subprocess.TimeoutExpired:
        late = True
        process.terminate()
        try:
            out, err = process.communicate(timeout=_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            out, err = b"", b""
    finally:
        process.kill()
        process.wait()
    said = [json.loads(line) for line in out.splitlines() if line]
    if said and "loading" not in said[-1]:
        return dict(said[-1])
    where = said[-1]["loading"] if said else ", ".join(specs)
    if late:
        return {"error": f"rollout.tools: {where} was not loaded after {LOAD_LIMIT_S:g} s"}
    last = ([""] + err.decode(errors="replace").split("\n"))[-2:]
    hint = " ".join(" ".join(last).split())[-300:]
    return {
        "error": f"rollout.tools: the process that loads {where} ended with exit status {process.returncode}"
        + (f" ({hint})" if hint else "; its module ends the interpreter")
    }


class ToolWorker:
    """A process that has loaded the tools; for one event loop. Make it by `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._said = bytearray()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, specs: Sequence[str]) -> ToolWorker:
        """Raises OSError where no process can be started or the tools cannot be loaded."""
        worker = cls(
            await asyncio.create_subprocess_exec(
                *_command(specs),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the rank
                limit=_LINE,
                env=_environment(),
            )
        )
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                said: dict[str, Any] = {"loading": ""}
                while "loading" in said:
                    said = await worker._answer()
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            await worker.end()
            raise OSError(f"it ended at once: {error}; {worker.said()}") from None
        except BaseException:
            await worker.end()
            raise
        if "tools" not in said:
            await worker.end()
            raise OSError(str(said.get("error")))
        return worker

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """The answer to a call. Raises OSError or ValueError where there is none, or it is garbled."""
        assert self._process.stdin is not None
        self._said.clear()
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = json.loads(await self._process.stdout.readline())
        if not isinstance(answer, dict):
            raise ValueError("it is garbled")
        return answer

    def said(self) -> str:
        """The end of what it has written on stdout and stderr since the last call began."""
        return bytes(self._said[-_TAIL:]).decode(errors="replace").strip()

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while part := await self._process.stderr.read(1 << 16):
                self._said += part
                del self._said[: -2 * _TAIL]

    async def end(self) -> None:
        """Kill it and whatever its tools have started. Returns after a few seconds even where that is impossible."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(how)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END_LIMIT_S)
                break
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(self._listening, 1.0)  # what it said last
        transport: Any = self._process._transport  # type: ignore[attr-defined]  # pipes that somebody still holds
        transport.close()
