"""Tools that the policy may call, and the processes that they run in.

A tool is an OpenAI function schema and a Python function; `rollout.tools` names it as `module:name`. Its function runs
in a small process of its own (`tool_process.py`), because it may hang, crash or print: then that process is killed and
replaced, and the policy reads what happened as its observation. No sandbox: tools are code that the user chose.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config import ConfigError
from megarl.rollout.calculator import calculate

OUTPUT_LIMIT = 4096
"""Characters of a tool's output that the policy gets to see."""
_MOST_PROCESSES = 16


@dataclass(frozen=True)
class Tool:
    """schema: OpenAI's {"type": "function", "function": {name, description, parameters}}; function: takes the arguments
    as keywords and returns text, or anything that JSON can hold. `spec` is where it was loaded from, `module:name`."""

    schema: dict[str, Any]
    function: Callable[..., Any]
    spec: str = ""

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


calculator = Tool(
    schema={
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    },
    function=calculate,
)


def load_tool(spec: str) -> Tool:
    """The Tool that `module:name` names. Raises ConfigError where there is none."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ConfigError(f"rollout.tools: {spec!r} is not of the form module:name")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"rollout.tools: cannot import {module} of {spec!r}: {error}") from None
    except AttributeError:
        raise ConfigError(f"rollout.tools: {module} has no {name}") from None
    if not isinstance(found, Tool):
        raise ConfigError(f"rollout.tools: {spec} is a {type(found).__name__}, not a megarl.rollout.tools.Tool")
    try:
        assert found.schema["type"] == "function" and found.name
    except (AssertionError, KeyError, TypeError):
        raise ConfigError(f"rollout.tools: {spec} has no OpenAI function schema with a name") from None
    return Tool(found.schema, found.function, spec)


def load_tools(specs: Sequence[str]) -> dict[str, Tool]:
    """Tools by the name that the policy calls them. Raises ConfigError for two of one name."""
    tools: dict[str, Tool] = {}
    for spec in specs:
        tool = load_tool(spec)
        if tool.name in tools:
            raise ConfigError(f"rollout.tools: {tools[tool.name].spec} and {spec} are both called {tool.name}")
        tools[tool.name] = tool
    return tools


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}


def argument_error(schema: dict[str, Any], arguments: Any) -> str:
    """What is wrong with the arguments of a call, in words for the policy; empty if nothing is."""
    if not isinstance(arguments, dict):
        return "the arguments must be a JSON object"
    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"argument {name} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no argument {name}"
        wanted = properties[name].get("type")
        types = _TYPES.get(wanted) if isinstance(wanted, str) else None
        if types and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            return f"argument {name} must be of type {wanted}"
    return ""


@dataclass(frozen=True)
class ToolResult:
    """text: what the policy reads; ok: whether the tool returned of its own accord and without an error."""

    text: str
    ok: bool


class ToolPool:
    """Processes that run tools, one call at a time each; at most `size`, kept until `aclose`. For one event loop.

    One is started after the other, for as long as calls wait: quick tools make do with few. timeout: seconds a call
    may take, not counting the wait for a free process.
    """

    def __init__(self, tools: dict[str, Tool], timeout: float, size: int = _MOST_PROCESSES) -> None:
        self.tools, self.timeout, self.size = tools, timeout, size
        self._idle: asyncio.Queue[asyncio.subprocess.Process | OSError] = asyncio.Queue()
        self._all: set[asyncio.subprocess.Process] = set()
        self._waiting = 0
        self._growing: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        """End the processes."""
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.gather(self._growing, return_exceptions=True)
        for process in list(self._all):
            await self._kill(process)

    async def call(self, name: str, arguments: Any) -> ToolResult:
        """Run a tool. Whatever goes wrong inside it is the result's text; nothing is raised."""
        tool = self.tools.get(name)
        if tool is None:
            return ToolResult(f"Error: there is no tool {name!r}; there are: {', '.join(self.tools) or 'none'}", False)
        if complaint := argument_error(tool.schema, arguments):
            return ToolResult(f"Error: {complaint}", False)
        try:
            process = await self._take()
        except OSError as error:
            return ToolResult(f"Error: the tool's process did not start ({error})", False)
        order = {"spec": tool.spec, "arguments": arguments, "limit": OUTPUT_LIMIT}
        try:
            answer = await asyncio.wait_for(_ask(process, order), self.timeout)
        except TimeoutError:
            await self._kill(process)
            return ToolResult(f"Error: the tool was stopped after {self.timeout:g} s", False)
        except (OSError, ValueError):
            await self._kill(process)
            return ToolResult("Error: the tool's process died", False)
        except BaseException:  # cancelled in the middle of a call: its answer must not reach another call
            await self._kill(process)
            raise
        self._idle.put_nowait(process)
        return ToolResult(str(answer["text"]), bool(answer["ok"]))

    async def _take(self) -> asyncio.subprocess.Process:
        """A free process. Raises OSError where none can be started."""
        while True:
            self._waiting += 1
            self._grow_if_needed()
            try:
                found = await self._idle.get()
            finally:
                self._waiting -= 1
            if isinstance(found, OSError):
                raise found
            if found.returncode is None:
                return found
            self._all.discard(found)

    def _grow_if_needed(self) -> None:
        if self._growing is None or self._growing.done():
            self._growing = asyncio.create_task(self._grow())

    async def _grow(self) -> None:
        while self._waiting > self._idle.qsize() and len(self._all) < self.size:
            try:
                self._idle.put_nowait(await self._start())
            except OSError as error:
                self._idle.put_nowait(error)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megarl.rollout.tool_process",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # so that what a tool starts can be killed with it
            limit=16 * OUTPUT_LIMIT,
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        )
        self._all.add(process)
        assert process.stdout is not None
        if not await process.stdout.readline():  # it says when it is up, for that is not the tool's time
            await self._kill(process)
            raise OSError("it ended at once")
        return process

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._waiting:
            self._grow_if_needed()


async def _ask(process: asyncio.subprocess.Process, order: dict[str, Any]) -> dict[str, Any]:
    """The answer of a tool's process. Raises OSError or ValueError where there is none, or it is garbled."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    answer: dict[str, Any] = json.loads(await process.stdout.readline())
    return answer
