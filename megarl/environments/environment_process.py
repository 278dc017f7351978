"""The process that runs tools, an environment or an agent: it loads them and answers a rank's orders.

`ForkServer` calls `serve`. The first order says what to load, {"load": [[key, spec], ...]}, and `ready` carries a
description of each. An order is pickled by the rank; each gets one JSON answer, in order:

    {"do": "begin", "row"}                              {"messages", "schemas"} or {"failed"}
    {"do": "call", "spec", "name", "arguments"}         {"ok", "text"}, and {"kind", "trace"} if it raised; {"lost"}
    {"do": "reward", "answer", "messages", "turns"}     {"value"} or {"failed"}
    {"do": "end"}                                       {} or {"failed"}
    {"do": "run", "row", "base_url", "api_key"}         {"value"} or {"failed"}; for agents

`failed` is a line, with {"kind", "trace"} for the log. This module imports the user's modules and nothing heavy.
"""

from __future__ import annotations

import asyncio
import base64
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

from megarl.config.plugins import format_error
from megarl.config.strict import ConfigError
from megarl.environments.loading import TOOLS_KEY, LoadedEnvironment, load, with_schemas
from megarl.environments.protocol import SessionLost
from megarl.environments.tools import Tool
from megarl.processes.messages import encode_frame, iter_orders, read_order
from megarl.utils.text import find_media_type

OUTPUT_LIMIT = 1 << 16
"""Characters of a tool's output that leave its process; longer output loses its middle."""
_MAX_TRACE_CHARS = 6000
"""Characters of a traceback in the log."""
_PACKAGE_FOLDER = Path(__file__).parents[1]


def serve(wire: socket.socket, settings: dict[str, Any], order: dict[str, Any]) -> None:
    try:
        loaded = []
        for key, spec in order["load"]:
            wire.sendall(encode_frame({"loading": spec}))
            loaded.append(load(spec, key))
        worker = _EnvironmentWorker(loaded)
        if any(entry.info.is_async for entry in loaded):
            asyncio.run(_serve_async(wire, worker))
            return
        _run_sync(worker.connect(wire))
    except ConfigError as error:
        wire.sendall(encode_frame({"error": str(error)}))
        return
    for number, content in iter_orders(wire):
        wire.sendall(encode_frame({**_run_sync(worker.handle_order(pickle.loads(content))), "number": number}))


async def _serve_async(wire: socket.socket, worker: _EnvironmentWorker) -> None:
    """Serve one order at a time in a loop that keeps running in between, for connections that must stay alive."""
    await worker.connect(wire)
    wire.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=wire)
    while True:
        try:
            number, content = await read_order(reader)
        except asyncio.IncompleteReadError:
            return
        writer.write(encode_frame({**await worker.handle_order(pickle.loads(content)), "number": number}))
        await writer.drain()


def _run_sync(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends and return its result."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise TypeError("a function that is not a coroutine function awaits something")


class _EnvironmentWorker:
    """The loaded tools or environment, and the environment's current object."""

    def __init__(self, loaded: Sequence[LoadedEnvironment]) -> None:
        self._loaded = list(loaded)
        self._tools: dict[str, Any] = {}
        """Objects of `rollout.tools`: by spec, a `Tool` or an object with `tools` and `call`."""
        self._environment: Any = None
        self._stage = ""
        """Which of the user's methods runs, for messages."""
        self._start_folder = os.getcwd()

    async def connect(self, wire: socket.socket) -> None:
        """Create the objects behind stateless tools, and send the descriptions. Raises ConfigError."""
        for index, entry in enumerate(self._loaded):
            if entry.info.kind != "tools":
                continue
            self._tools[entry.info.spec] = entry.target
            if isinstance(entry.target, Tool):
                continue
            try:
                instance = self._tools[entry.info.spec] = entry.target()
                if hasattr(instance, "reset"):
                    await _await_value(instance.reset())
                if entry.info.has_dynamic_tools:
                    info = with_schemas(entry.info, await _await_value(instance.tools()), TOOLS_KEY)
                    self._loaded[index] = LoadedEnvironment(info, entry.target)
            except BaseException as error:  # noqa: B036
                raise ConfigError(f"{TOOLS_KEY}: {entry.info.spec} cannot be started: {format_error(error)}") from None
        wire.sendall(encode_frame({"ready": [dataclasses.asdict(entry.info) for entry in self._loaded]}))

    async def handle_order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to an order; whatever it raises becomes {"failed", "kind", "trace"}."""
        try:
            answer: dict[str, Any] = await getattr(self, f"_{order['do']}")(order)
        except BaseException as error:  # noqa: B036  SystemExit and the like must not end the process silently
            frames = traceback.extract_tb(error.__traceback__)
            user_frames = [frame for frame in frames if not Path(frame.filename).is_relative_to(_PACKAGE_FOLDER)]
            location = f" ({user_frames[-1].filename}:{user_frames[-1].lineno})" if user_frames else ""
            answer = {"failed": f"{self._stage} raised {format_error(error)}{location}", **_describe_error(error)}
        with contextlib.suppress(OSError):  # a tool may have changed the working directory
            os.chdir(self._start_folder)
        return answer

    async def _begin(self, order: dict[str, Any]) -> dict[str, Any]:
        (entry,) = self._loaded
        info, self._stage = entry.info, "it"
        self._environment = entry.target()
        messages = None
        if hasattr(self._environment, "reset"):
            self._stage = "reset"
            row, accepted = order["row"], info.accepted_columns
            columns = {name: value for name, value in row.items() if accepted is None or name in accepted}
            messages = await _await_value(self._environment.reset(**columns))
            if not isinstance(messages, str | list | tuple | None):
                raise TypeError(f"it returned a {type(messages).__name__}: it must return None, text or messages")
        self._stage = "tools"
        schemas = await _await_value(self._environment.tools()) if info.has_dynamic_tools else info.schemas
        schemas = with_schemas(info, schemas, info.name).schemas
        json.dumps(messages)
        return {"messages": messages, "schemas": schemas}

    async def _call(self, order: dict[str, Any]) -> dict[str, Any]:
        name, arguments = order["name"], order["arguments"]
        try:
            target = self._tools[order["spec"]] if order["spec"] else self._environment
            if isinstance(target, Tool):
                value = target.function(**arguments)
            elif hasattr(target, "tools"):
                value = target.call(name, arguments)
            else:
                value = getattr(target, name)(**arguments)
            value, images = split_images(await _await_value(value), f"the result of {name}")
            answer = {"ok": True, "text": truncate_middle(dump_output(value))}
            return answer | ({"images": images} if images else {})
        except SessionLost as error:
            return {**_describe_error(error), "lost": format_error(error, named=False)}
        except BaseException as error:  # noqa: B036
            text = truncate_middle(f"Error: {format_error(error, named=False)}")
            return {**_describe_error(error), "ok": False, "text": text}

    async def _reward(self, order: dict[str, Any]) -> dict[str, Any]:
        self._stage = "reward"
        arguments = {name: order[name] for name in self._loaded[0].info.reward_arguments}
        return {"value": to_json_value(await _await_value(self._environment.reward(**arguments)))}

    async def _end(self, order: dict[str, Any]) -> dict[str, Any]:
        self._stage = "close"
        environment, self._environment = self._environment, None
        if hasattr(environment, "close"):
            await _await_value(environment.close())
        return {}

    async def _run(self, order: dict[str, Any]) -> dict[str, Any]:
        self._stage = "it"
        try:
            arguments = {name: order[name] for name in ("row", "base_url", "api_key")}
            return {"value": to_json_value(await self._loaded[0].target(**arguments))}
        finally:
            pending_tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in pending_tasks:
                task.cancel()
            await asyncio.gather(*pending_tasks, return_exceptions=True)


async def _await_value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def split_images(value: Any, location: str) -> tuple[Any, list[str]]:
    """Split message parts that a tool returned into text and images, as base64; other values have no images.

    An image is a part of OpenAI's ("image_url"), of Hugging Face's ("image", a path or a data URL), or of MCP ("image"
    with "data"). Raises TypeError for other parts, and OSError for a file that cannot be read. Like all of this
    module, it imports nothing heavy.
    """
    if find_media_type(value) not in ("image_url", "image"):
        return value, []
    texts: list[str] = []
    images: list[str] = []
    for part in value if isinstance(value, list) else [value]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("image_url", "image"):
            images.append(_read_base64(part, location))
        else:
            raise TypeError(
                f"{location} holds the part {str(part)[:80]!r} beside images, which is neither text nor image"
            )
    return "".join(texts), images


def _read_base64(part: dict[str, Any], location: str) -> str:
    source = part.get("data") or part.get("image_url") or part.get("image")
    source = source.get("url") if isinstance(source, dict) else source
    if not isinstance(source, str) or source.startswith(("http://", "https://")):
        raise TypeError(f"{location} holds the image {str(source)[:80]!r}, which is no path, data URL or base64")
    if part.get("data") or source.startswith("data:"):
        encoded = source if part.get("data") else source.partition(",")[2]
        base64.b64decode(encoded, validate=True)  # raises ValueError
        return encoded
    return base64.b64encode(Path(source.removeprefix("file://")).read_bytes()).decode()


def dump_output(value: Any) -> str:
    """Convert a tool's return value to text. Raises TypeError or ValueError if JSON cannot hold it."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("the tool returned bytes; it must return text, or a JSON value")
    if kind := find_media_type(value):
        raise TypeError(f"the tool returned a part of type {kind!r}; only text is supported; return text")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def truncate_middle(text: str) -> str:
    """Replace the middle of a text longer than `OUTPUT_LIMIT`."""
    if len(text) <= OUTPUT_LIMIT:
        return text
    half = OUTPUT_LIMIT // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters cut) ... {text[-half:]}"


def to_json_value(value: Any) -> Any:
    """Convert a reward to JSON values. Raises TypeError with a readable message if that is impossible."""
    if all(hasattr(value, name) for name in ("reward", "parts", "turns")):
        value = {name: getattr(value, name) for name in ("reward", "parts", "turns")}
    try:  # scalars and arrays of numpy and torch have `tolist`
        return json.loads(json.dumps(value, default=lambda array: array.tolist()))
    except (TypeError, ValueError, AttributeError, RecursionError):
        raise TypeError(f"it returned a {type(value).__name__}; it must return a number") from None


def _describe_error(error: BaseException) -> dict[str, str]:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return {
        "kind": f"{type(error).__name__} at {frame.filename}:{frame.lineno}",
        "trace": "".join(traceback.format_exception(error))[-_MAX_TRACE_CHARS:],
    }
