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
    property_schemas = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": property_schemas, "required": list(properties)}
    return Tool({"type": "function", "function": {"name": name, "parameters": parameters}}, function)


def _raise() -> str:
    raise KeyError("no such city")


def _hang(pid_file: str) -> str:
    child = subprocess.Popen(["sleep", "600"])  # must not outlive the tool
    Path(pid_file).write_text(f"{os.getpid()} {child.pid}")
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
hangs = _tool("hangs", _hang, pid_file="string")
dies = _tool("dies", lambda: os._exit(0))
exits = _tool("exits", lambda: sys.exit(0))
prints = _tool("prints", _print)
long = _tool("long", lambda: "x" * 100_000)
table = _tool("table", lambda: {"a": [1, "ä"]})
slow = _tool("slow", _slow, seconds="number")
pid = _tool("pid", lambda: str(os.getpid()))
modules = _tool("modules", lambda: [name for name in ("torch", "sglang", "transformers") if name in sys.modules])
not_a_tool = 3


def _background(pid_file: str, behavior: str) -> str:
    """Leave a process behind: a child, one in its own session, or a daemon that keeps all files open."""
    if behavior == "child":
        pid = subprocess.Popen(["sleep", "600"]).pid
    elif behavior == "session":
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
    with open(pid_file, "a") as file:
        file.write(f"{pid}\n")
    return "left"


def _leave_processes(pid_file: str, behavior: str) -> str:
    _background(pid_file, "daemon")
    _background(pid_file, "session")
    if behavior == "die":
        os._exit(3)
    if behavior == "fault":
        os.kill(os.getpid(), 11)
    if behavior == "hang":
        time.sleep(600)
    return "left"


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("not me")


def _raise_unprintable() -> str:
    raise _UnprintableError


def _interrupt() -> str:
    raise KeyboardInterrupt


def _print_much() -> str:
    sys.stderr.write("x" * 1_000_000)
    print("printed")
    print("and written", file=sys.stderr)
    raise LookupError("no such thing")


def _deeply_nested() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def _circular() -> list[Any]:
    nested: list[Any] = []
    nested.append(nested)
    return nested


def _close() -> str:
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    return "closed"


def _close_all() -> str:
    os.closerange(0, 64)
    return "closed"


def _change_directory() -> str:
    os.chdir("/")
    return "away"


background = _tool("background", _background, pid_file="string", behavior="string")
leaves_processes = _tool("leaves_processes", _leave_processes, pid_file="string", behavior="string")
unprintable_error = _tool("unprintable_error", _raise_unprintable)
interrupts = _tool("interrupts", _interrupt)
prints_much = _tool("prints_much", _print_much)
returns_bytes = _tool("returns_bytes", lambda: b"abc")
generates = _tool("generates", lambda: (i for i in range(3)))
nan = _tool("nan", lambda: float("nan"))
returns_none = _tool("returns_none", lambda: None)
deeply_nested = _tool("deeply_nested", _deeply_nested)
circular = _tool("circular", _circular)
huge_output = _tool("huge_output", lambda: "x" * 300_000_000)
lone_surrogate = _tool("lone_surrogate", lambda: "half \ud83d of it")
closes_stdout = _tool("closes_stdout", _close)
closes_all = _tool("closes_all", _close_all)
changes_directory = _tool("changes_directory", _change_directory)
working_directory = _tool("working_directory", lambda: os.getcwd())
unserializable = _tool("unserializable", lambda: _UnprintableError())
