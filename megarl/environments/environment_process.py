"""What runs in a process of tools, of an environment or of an agent: it loads them, and answers a rank's orders.

`serve` is called by a nursery. Its order says what is to be loaded: {"load": [[key, spec], ...]}; `ready` is a
description of each. An order is pickled, from the rank; answers are JSON, one for each, in turn:

    {"do": "begin", "row"}                              {"messages", "schemas"} or {"failed"}
    {"do": "call", "spec", "name", "arguments"}         {"ok", "text"}, and {"kind", "trace"} where it raised; {"lost"}
    {"do": "reward", "answer", "messages", "turns"}     {"value"} or {"failed"}
    {"do": "end"}                                       {} or {"failed"}
    {"do": "run", "row", "base_url", "api_key"}         {"value"} or {"failed"}; of an agent

`failed` is a line, with {"kind", "trace"} for the log. Imports the user's modules and nothing heavy.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import pickle
import socket
import traceback
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from megarl.config.strict import ConfigError
from megarl.environments.loading import TOOLS_KEY, LoadedEnvironment, load, with_schemas
from megarl.environments.protocol import SessionLost
from megarl.environments.tools import Tool, format_error
from megarl.processes.messages import encode_frame, iter_orders, read_order
from megarl.utils.text import find_media_type

OUTPUT_LIMIT = 1 << 16
"""Characters of a tool's output that leave its process; of longer ones the head and the tail."""
_MAX_TRACE_CHARS = 6000
"""Characters of a traceback that go into the log."""
_PACKAGE_FOLDER = Path(__file__).parents[1]


def serve(wire: socket.socket, given: dict[str, Any], order: dict[str, Any]) -> None:
    try:
        loaded = []
        for key, spec in order["load"]:
            wire.sendall(encode_frame({"loading": spec}))
            loaded.append(load(spec, key))
        served = _EnvironmentWorker(loaded)
        if any(one.info.is_async for one in loaded):
            asyncio.run(_serve_async(wire, served))
            return
        _run_sync(served.connect())
        wire.sendall(encode_frame({"ready": served.describe()}))
    except ConfigError as error:
        wire.sendall(encode_frame({"error": str(error)}))
        return
    for number, content in iter_orders(wire):
        wire.sendall(encode_frame({**_run_sync(served.handle_order(pickle.loads(content))), "number": number}))


async def _serve_async(wire: socket.socket, served: _EnvironmentWorker) -> None:
    """One order at a time, in a loop that goes on between them: a connection may have to be kept alive."""
    await served.connect()
    wire.sendall(encode_frame({"ready": served.describe()}))
    wire.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=wire)
    while True:
        try:
            number, content = await read_order(reader)
        except asyncio.IncompleteReadError:
            return
        writer.write(encode_frame({**await served.handle_order(pickle.loads(content)), "number": number}))
        await writer.drain()


def _run_sync(work: Coroutine[Any, Any, Any]) -> Any:
    """What comes of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise TypeError("a function that is no coroutine function waits for something")


class _EnvironmentWorker:
    """What has been loaded, and of an environment the object that is there now."""

    def __init__(self, loaded: Sequence[LoadedEnvironment]) -> None:
        self._loaded = list(loaded)
        self._tools: dict[str, Any] = {}
        """Of rollout.tools: by spec a `Tool`, or an object with `tools` and `call`."""
        self._environment: Any = None
        self._start_folder = os.getcwd()

    async def connect(self) -> None:
        """Have what tools without a state need. Raises ConfigError."""
        for place, one in enumerate(self._loaded):
            if one.info.kind != "tools":
                continue
            self._tools[one.info.spec] = one.target
            if isinstance(one.target, Tool):
                continue
            try:
                made = self._tools[one.info.spec] = one.target()
                if hasattr(made, "reset"):
                    await _await_value(made.reset())
                if one.info.has_dynamic_tools:
                    found = with_schemas(one.info, await _await_value(made.tools()), TOOLS_KEY)
                    self._loaded[place] = LoadedEnvironment(found, one.target)
            except BaseException as error:  # noqa: B036
                raise ConfigError(f"{TOOLS_KEY}: {one.info.spec} cannot be begun: {format_error(error)}") from None

    def describe(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(one.info) for one in self._loaded]

    async def handle_order(self, order: dict[str, Any]) -> dict[str, Any]:
        done: dict[str, Any] = await getattr(self, f"_{order['do']}")(order)
        with contextlib.suppress(OSError):  # a tool may have gone elsewhere
            os.chdir(self._start_folder)
        return done

    async def _begin(self, order: dict[str, Any]) -> dict[str, Any]:
        (one,), what = self._loaded, "it"
        known = one.info
        try:
            self._environment = one.target()
            what = "reset"
            row = {
                name: value
                for name, value in order["row"].items()
                if known.accepted_columns is None or name in known.accepted_columns
            }
            messages = (
                await _await_value(self._environment.reset(**row)) if hasattr(self._environment, "reset") else None
            )
            if not isinstance(messages, str | list | tuple | None):
                raise TypeError(f"it returned a {type(messages).__name__}: it must return None, text or messages")
            what = "tools"
            schemas = await _await_value(self._environment.tools()) if known.has_dynamic_tools else known.schemas
            whole = with_schemas(known, schemas, known.name).schemas
            json.dumps(messages)
        except BaseException as error:  # noqa: B036
            return _make_failure(what, error)
        return {"messages": messages, "schemas": whole}

    async def _call(self, order: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        name, arguments = order["name"], order["arguments"]
        try:
            found = self._tools[order["spec"]] if order["spec"] else self._environment
            if isinstance(found, Tool):
                value = found.function(**arguments)
            elif hasattr(found, "tools"):
                value = found.call(name, arguments)
            else:
                value = getattr(found, name)(**arguments)
            ok, text = True, dump_output(await _await_value(value))
        except SessionLost as error:
            return {**_describe_error(error), "lost": format_error(error, named=False)}
        except BaseException as error:  # noqa: B036  SystemExit and the like must not end the process in silence
            ok, text = False, f"Error: {format_error(error, named=False)}"
            answer = _describe_error(error)
        return {**answer, "ok": ok, "text": truncate_middle(text)}

    async def _reward(self, order: dict[str, Any]) -> dict[str, Any]:
        takes = self._loaded[0].info.reward_arguments
        try:
            value = await _await_value(self._environment.reward(**{name: order[name] for name in takes}))
            return {"value": to_json_value(value)}
        except BaseException as error:  # noqa: B036
            return _make_failure("reward", error)

    async def _end(self, order: dict[str, Any]) -> dict[str, Any]:
        done, self._environment = self._environment, None
        try:
            if done is not None and hasattr(done, "close"):
                await _await_value(done.close())
        except BaseException as error:  # noqa: B036
            return _make_failure("close", error)
        return {}

    async def _run(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            run = self._loaded[0].target
            value = await run(row=order["row"], base_url=order["base_url"], api_key=order["api_key"])
            return {"value": to_json_value(value)}
        except BaseException as error:  # noqa: B036
            return _make_failure("it", error)
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)


async def _await_value(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def dump_output(value: Any) -> str:
    """What a tool returned, for the policy. Raises TypeError or ValueError for what JSON cannot hold."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("the tool returned bytes; it must return text, or what JSON can hold")
    if kind := find_media_type(value):
        raise TypeError(
            f"the tool returned a part of type {kind!r}; only text can be read here, it must say it in words"
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def truncate_middle(text: str, limit: int = OUTPUT_LIMIT) -> str:
    """Its head and its tail, where it has more characters than `limit`."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters cut) ... {text[-half:]}"


def to_json_value(value: Any) -> Any:
    """A reward as JSON has it. Raises TypeError in words for what it cannot hold."""
    if all(hasattr(value, name) for name in ("reward", "parts", "turns")):
        value = {name: getattr(value, name) for name in ("reward", "parts", "turns")}
    try:
        return json.loads(json.dumps(value, default=_array_to_list))
    except (TypeError, ValueError, AttributeError, RecursionError):
        raise TypeError(f"it returned a {type(value).__name__}; it must return a number") from None


def _array_to_list(value: Any) -> Any:
    return value.tolist()  # a scalar or an array of numpy's or torch's; else an AttributeError, which is none of ours


def _make_failure(what: str, error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if not Path(one.filename).is_relative_to(_PACKAGE_FOLDER)]
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return {"failed": f"{what} raised {format_error(error)}{place}", **_describe_error(error)}


def _describe_error(error: BaseException) -> dict[str, str]:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return {
        "kind": f"{type(error).__name__} at {place.filename}:{place.lineno}",
        "trace": "".join(traceback.format_exception(error))[-_MAX_TRACE_CHARS:],
    }
