"""Tools that the policy may call, and the processes that they run in.

A tool is an OpenAI function schema and a Python function; `rollout.tools` names it as `module:name`. Its function runs
in a small process of its own (`tool_process.py`), because it may hang, crash or print: then that process is killed and
replaced, and the policy reads what happened as its observation. No sandbox: tools are code that the user chose.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.data.text import encodable
from megarl.rollout.calculator import calculate
from megarl.rollout.tool_worker import ToolWorker, describe

OUTPUT_LIMIT = 1 << 16
"""Characters of a tool's output that are kept at all, against floods. What the policy gets to see of them is counted in
tokens, `rollout.max_observation`."""
_NOTES_OF_A_KIND = 10  # an untrained policy can do the same thing wrong a million times
_MOST_KINDS = 100
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


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


def worded(error: BaseException, named: bool = True) -> str:
    """What an error says, in one line; `named` by its class, which stands alone where it says nothing."""
    kind = type(error).__name__
    try:
        text = " ".join(str(error).split())[:2000]
    except Exception:  # its __str__ is a user's, too
        text = ""
    return f"{kind}: {text}" if text and named else text or kind


def load_tool(spec: str) -> Tool:
    """The Tool that `module:name` names, in this process. Raises ConfigError where there is none, or a broken one."""
    module, name = _parts(spec)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except BaseException as error:  # noqa: B036  whatever a module raises while it is imported, sys.exit too
        raise ConfigError(f"rollout.tools: cannot import {module} of {spec!r}: {worded(error)}") from None
    if found is None:
        raise ConfigError(f"rollout.tools: {module} has no {name}")
    if not isinstance(found, Tool):
        raise ConfigError(f"rollout.tools: {spec} is a {type(found).__name__}, not a megarl.rollout.tools.Tool")
    check_schema(found.schema, spec)
    check_function(found, spec)
    return Tool(found.schema, found.function, spec)


def load_tools(specs: Sequence[str]) -> dict[str, Tool]:
    """Tools by the name that the policy calls them. They are loaded once in a tool process, and only there: the
    functions of what is returned cannot be called here. Raises ConfigError for what `load_tool` does, for a module that
    ends the process or takes too long, and for two tools of one name."""
    tools: dict[str, Tool] = {}
    if not specs:
        return tools
    for spec in specs:
        _parts(spec)
    said = describe(tuple(dict.fromkeys(specs)))
    if "error" in said:
        raise ConfigError(said["error"])
    schemas = {tool["spec"]: tool["schema"] for tool in said["tools"]}
    for spec in specs:
        tool = Tool(schemas[spec], _elsewhere, spec)
        if tool.name in tools:
            raise ConfigError(f"rollout.tools: {tools[tool.name].spec} and {spec} are both called {tool.name}")
        tools[tool.name] = tool
    return tools


def _parts(spec: str) -> tuple[str, str]:
    module, _, name = spec.partition(":")
    if not module or not name or module.startswith("."):
        raise ConfigError(f"rollout.tools: {spec!r} is not of the form module:name")
    return module, name


def _elsewhere(**arguments: Any) -> str:
    raise RuntimeError("tools run in processes of their own, see ToolPool")


def check_schema(schema: Any, spec: str) -> None:
    """Raise ConfigError where it is no OpenAI function schema that templates, parsers and `argument_error` can read."""

    def need(fine: bool, what: str) -> None:
        if not fine:
            raise ConfigError(f"rollout.tools: {spec} has no OpenAI function schema: {what}")

    need(isinstance(schema, dict) and schema.get("type") == "function", "it must have type=function")
    function = schema.get("function")
    need(isinstance(function, dict), "`function` must be a mapping")
    name, parameters = function.get("name"), function.get("parameters")
    plain = isinstance(name, str) and bool(_NAME.fullmatch(name))
    need(plain, "its name must be 1 to 64 of the characters a-zA-Z0-9_.-")
    need(isinstance(function.get("description", ""), str), "`description` must be text")
    need(parameters is None or isinstance(parameters, dict), "`parameters` must be a mapping")
    properties, required = (parameters or {}).get("properties") or {}, (parameters or {}).get("required") or []
    fine = isinstance(properties, dict) and all(isinstance(about, dict) for about in properties.values())
    need(fine, "`properties` must map names to mappings")
    need(isinstance(required, list | tuple), "`required` must be a list of names")
    for argument in required:
        need(argument in properties, f"`required` names {argument!r}, which is not among its `properties`")
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        need(False, f"JSON cannot hold it, {worded(error)}")


def check_function(tool: Tool, spec: str) -> None:
    """Raise ConfigError where the function cannot be called with what the schema asks for."""
    if not callable(tool.function):
        raise ConfigError(f"rollout.tools: the function of {spec} is a {type(tool.function).__name__}")
    if inspect.iscoroutinefunction(tool.function) or inspect.isgeneratorfunction(tool.function):
        raise ConfigError(f"rollout.tools: the function of {spec} is a coroutine or a generator; it must return text")
    try:
        signature = inspect.signature(tool.function)
    except (TypeError, ValueError):  # of C, which does not say
        return
    parameters = tool.schema["function"].get("parameters") or {}
    for names in (parameters.get("required") or (), parameters.get("properties") or ()):
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ConfigError(
                f"rollout.tools: the function of {spec} cannot be called with the schema's arguments "
                f"({', '.join(names)}): {error}"
            ) from None


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
    may take, not counting the wait for a free process. log: a file for what goes wrong inside of tools, of which the
    policy reads only a line: the call, the traceback and what the tool has printed; a few of each kind.
    """

    def __init__(self, tools: dict[str, Tool], timeout: float, size: int, log: Path | None = None) -> None:
        self.tools, self.timeout, self.size = tools, timeout, size
        self._idle: asyncio.Queue[ToolWorker | OSError] = asyncio.Queue()
        self._all: set[ToolWorker] = set()
        self._waiting = 0
        self._growing: asyncio.Task[None] | None = None
        self._log = log
        self._noted: Counter[tuple[str, str]] = Counter()

    async def aclose(self) -> None:
        """End the processes, and whatever their tools have started."""
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.gather(self._growing, return_exceptions=True)
        await asyncio.gather(*map(self._end, list(self._all)))

    async def call(self, name: str, arguments: Any) -> ToolResult:
        """Run a tool. Whatever goes wrong inside it is the result's text; nothing is raised."""
        tool = self.tools.get(name)
        if tool is None:
            return ToolResult(f"Error: there is no tool {name!r}; there are: {', '.join(self.tools) or 'none'}", False)
        if complaint := argument_error(tool.schema, arguments):
            return ToolResult(f"Error: {complaint}", False)
        try:
            worker = await self._take()
        except OSError as error:
            return self._failed(name, arguments, "the tool's process did not start", "start", str(error))
        try:
            order = {"spec": tool.spec, "arguments": arguments, "limit": OUTPUT_LIMIT}
            answer = await asyncio.wait_for(worker.ask(order), self.timeout)
            result = ToolResult(encodable(str(answer["text"])), bool(answer["ok"]))
        except TimeoutError:
            await self._end(worker)
            what = f"the tool was stopped after {self.timeout:g} s"
            return self._failed(name, arguments, what, "late", worker.said())
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            await self._end(worker)
            return self._failed(name, arguments, "the tool's process died", "died", worker.said())
        except BaseException:  # cancelled in the middle of a call: its answer must not reach another call
            await self._end(worker)
            raise
        if not result.ok:
            self._note(name, arguments, result.text, str(answer.get("kind")), f"{answer.get('trace')}\n{worker.said()}")
        self._idle.put_nowait(worker)
        return result

    def _failed(self, name: str, arguments: Any, what: str, kind: str, said: str) -> ToolResult:
        self._note(name, arguments, what, kind, said)
        return ToolResult(f"Error: {what}", False)

    def _note(self, name: str, arguments: Any, what: str, kind: str, said: str) -> None:
        """Write it into the log; a log that cannot be written must not end the run."""
        self._noted[name, kind] += 1
        if self._log is None or self._noted[name, kind] > _NOTES_OF_A_KIND or len(self._noted) > _MOST_KINDS:
            return
        last = "; no more of this kind are noted" if self._noted[name, kind] == _NOTES_OF_A_KIND else ""
        call = json.dumps(arguments)[:1000]
        text = f"--- {time.strftime('%F %T')} {name} {call}: {what[:1000]}{last}\n{said.strip()}\n"
        with contextlib.suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)

    async def _take(self) -> ToolWorker:
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
            if found.alive:
                return found
            await self._end(found)

    def _grow_if_needed(self) -> None:
        if self._growing is None or self._growing.done():
            self._growing = asyncio.create_task(self._grow())

    async def _grow(self) -> None:
        while self._waiting > self._idle.qsize() and len(self._all) < self.size:
            try:
                worker = await ToolWorker.start([tool.spec for tool in self.tools.values()])
            except OSError as error:
                self._idle.put_nowait(error)
            else:
                self._all.add(worker)
                self._idle.put_nowait(worker)

    async def _end(self, worker: ToolWorker) -> None:
        self._all.discard(worker)
        await worker.end()
        if self._waiting:
            self._grow_if_needed()
