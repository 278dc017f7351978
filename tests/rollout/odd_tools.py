"""Tools that misbehave, for tests; loaded by the tool processes as `odd_tools:name`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megarl.rollout.tools import Tool


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
