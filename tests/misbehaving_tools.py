"""Tools for tests, most of which misbehave; tool processes load them as `misbehaving_tools:name`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megarl.environments.tools import Tool


def _tool(name: str, function: Any, **properties: str) -> Tool:
    described = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": described, "required": list(properties)}
    return Tool({"type": "function", "function": {"name": name, "parameters": parameters}}, function)


def _raise() -> str:
    raise KeyError("no such city")


def _hang(mark: str) -> str:
    child = subprocess.Popen(["sleep", "600"])  # must not outlive the tool
    Path(mark).write_text(f"{os.getpid()} {child.pid}")
    while True:
        time.sleep(60)


def _print() -> str:
    print('{"ok": true, "text": "forged"}')
    os.write(1, b'{"ok": true, "text": "forged"}\n')
    return "real"


def _slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


async def waits(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds:g} s"


async def waits_and_raises() -> str:
    """Wait, and fail."""
    await asyncio.sleep(0)
    raise LookupError("no such place")


class _Waits:
    async def __call__(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds


waits_as_object = _tool("waits_as_object", _Waits(), seconds="number")
raises = _tool("raises", _raise)
hangs = _tool("hangs", _hang, mark="string")
dies = _tool("dies", lambda: os._exit(0))
exits = _tool("exits", lambda: sys.exit(0))
prints = _tool("prints", _print)
long = _tool("long", lambda: "x" * 100_000)
table = _tool("table", lambda: {"a": [1, "ä"]})
slow = _tool("slow", _slow, seconds="number")
pid = _tool("pid", lambda: str(os.getpid()))
modules = _tool("modules", lambda: [name for name in ("torch", "sglang", "transformers") if name in sys.modules])
not_a_tool = 3


def _background(mark: str, how: str) -> str:
    """Leave a process behind: a child, one in its own session, or a daemon that keeps all files open."""
    if how == "child":
        pid = subprocess.Popen(["sleep", "600"]).pid
    elif how == "session":
        pid = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    else:
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(writing, str(os.getpid()).encode())
                while True:
                    time.sleep(60)
            os._exit(0)
        pid = int(os.read(reading, 20))
    with open(mark, "a") as file:
        file.write(f"{pid}\n")
    return "left"


def _leave(mark: str, how: str) -> str:
    _background(mark, "daemon")
    _background(mark, "session")
    if how == "die":
        os._exit(3)
    if how == "fault":
        os.kill(os.getpid(), 11)
    if how == "hang":
        time.sleep(600)
    return "left"


class _Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("not me")


def _mute() -> str:
    raise _Mute


def _interrupt() -> str:
    raise KeyboardInterrupt


def _noisy() -> str:
    sys.stderr.write("x" * 1_000_000)
    print("printed")
    print("and written", file=sys.stderr)
    raise LookupError("no such thing")


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def _circle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _close() -> str:
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    return "closed"


def _close_all() -> str:
    os.closerange(0, 64)
    return "closed"


def _away() -> str:
    os.chdir("/")
    return "away"


background = _tool("background", _background, mark="string", how="string")
leaves = _tool("leaves", _leave, mark="string", how="string")
mute = _tool("mute", _mute)
interrupts = _tool("interrupts", _interrupt)
noisy = _tool("noisy", _noisy)
octets = _tool("octets", lambda: b"abc")
generates = _tool("generates", lambda: (i for i in range(3)))
nan = _tool("nan", lambda: float("nan"))
nothing = _tool("nothing", lambda: None)
deep = _tool("deep", _deep)
circle = _tool("circle", _circle)
huge = _tool("huge", lambda: "x" * 300_000_000)
half = _tool("half", lambda: "half \ud83d of it")
closes = _tool("closes", _close)
closes_all = _tool("closes_all", _close_all)
away = _tool("away", _away)
here = _tool("here", lambda: os.getcwd())
unshown = _tool("unshown", lambda: _Mute())
