"""MCP servers as tools: `mcp:FILE.json`, a file in the format common to MCP clients (`ADAPTERS.md`).

Each session has its own servers: a process for each `command` (stdio), a client for each `url` (streamable HTTP). The
SDK is the official one, `mcp`, 1.30 or 2. Only their common API is used; fields that they name differently are read in
wire format.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from megarl.config import ConfigError
from megarl.config.paths import substitute_env
from megarl.config.plugins import format_error
from megarl.environments.protocol import SessionLost

START_LIMIT_S = 60.0
"""Timeout for a server to start and list its tools."""
END_LIMIT_S = 8.0
_MAX_PAGES = 100
_MAX_STDERR_BYTES = 1 << 20  # bytes of a server's stderr that are kept
_MAX_INVALID_LINES = 1000  # a server is dropped after this many lines that are not messages
_IGNORED_KEYS = {"alwaysAllow", "autoApprove", "timeout", "trust", "icon"}
"""Keys that other clients use in the same file."""


class ServerConfig(BaseModel, strict=True):
    """An entry of `mcpServers`, with either `command` or `url`. `tools` lists those to offer; empty means all."""

    type: str = ""
    command: str = Field("", min_length=1)
    args: list[str] = []
    env: dict[str, str] | None = None
    cwd: str | None = Field(None, min_length=1)
    url: str = Field("", pattern="^https?://")
    headers: dict[str, str] | None = None
    tools: list[str] = []
    disabled: bool = False
    description: Any = None

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("needs either `command` or `url`")
        if self.type == "sse":
            raise ValueError("is of type sse, which MCP has removed; use its streamable HTTP address")
        key, types = ("command", ["stdio"]) if self.command else ("url", ["http", "streamable-http", "streamableHttp"])
        if self.type not in ("", *types):
            raise ValueError(f"is of type {self.type!r}, which does not fit `{key}`")
        return self


def environment(file: str) -> type[McpTools]:
    """Return the class for `mcp:FILE`. Raises ConfigError for an invalid file or a missing SDK."""
    _import_sdk()
    return type("McpTools", (McpTools,), {"servers": read_servers(file)})


def read_servers(file: str) -> dict[str, ServerConfig]:
    """Read a file's enabled servers, by name. `${NAME}` is not substituted yet."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    entries = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise ConfigError(f'{file} must be {{"mcpServers": {{NAME: {{"command": ...}} or {{"url": ...}}}}}}')
    servers = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"server {name}: must be a mapping")
        if entry.get("disabled") is True:
            continue
        if unknown := sorted(entry.keys() - ServerConfig.model_fields.keys() - _IGNORED_KEYS):
            known = ", ".join(sorted(ServerConfig.model_fields))
            raise ConfigError(f"server {name}: has an unknown key {unknown[0]!r}; known keys are {known}")
        try:
            servers[name] = ServerConfig(**entry)
        except ValidationError as error:
            fault = error.errors()[0]
            keys = "".join(f"`{key}`: " for key in fault["loc"])
            raise ConfigError(f"server {name}: {keys}{fault['msg'].removeprefix('Value error, ')}") from None
    if not servers:
        raise ConfigError(f"{file} has no enabled server")
    return servers


class McpTools:
    """The tools of MCP servers for one session. `environment` makes the class for a spec."""

    servers: dict[str, ServerConfig] = {}

    def __init__(self) -> None:
        self._connections: list[Connection] = []
        self._connection_by_tool: dict[str, Connection] = {}
        self._schemas: list[dict[str, Any]] = []

    async def reset(self) -> None:
        """Start the servers and list their tools.

        Raises ConfigError for mistakes in the file, and SessionLost for a server that does not start.
        """
        self._connections = [Connection(name, server) for name, server in self.servers.items()]
        await asyncio.gather(*(connection.start() for connection in self._connections))
        for connection in self._connections:
            for tool in connection.select_tools():
                name = tool["name"]
                if name in self._connection_by_tool:
                    first, second = self._connection_by_tool[name].name, connection.name
                    subject = f"servers {first} and {second} both have a tool"
                    if first == second:
                        subject = f"server {first} has two tools"
                    raise ConfigError(f"MCP: {subject} of the name {name}; list those to offer in the entry's `tools`")
                self._connection_by_tool[name] = connection
                parameters = tool.get("inputSchema") or {"type": "object", "properties": {}}
                function = {"name": name, "description": tool.get("description") or "", "parameters": parameters}
                self._schemas.append({"type": "function", "function": function})

    def tools(self) -> list[dict[str, Any]]:
        """Return OpenAI schemas of the tools that the servers offered when the session started."""
        return list(self._schemas)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool. Raises ToolFailed if the server returns an error, SessionLost if the server has ended."""
        return await self._connection_by_tool[name].call(name, arguments)

    async def close(self) -> None:
        """Stop the server processes and clients."""
        await asyncio.gather(*(connection.close() for connection in self._connections))


class ToolFailed(RuntimeError):
    """A server's error message for a failed call, shown to the policy."""


class Connection:
    """A client of one server. The SDK's contexts must be exited by the task that entered them, which is `_run`."""

    def __init__(self, name: str, server: ServerConfig) -> None:
        self.name, self._server = name, server
        self._tools: list[dict[str, Any]] = []
        self._session: Any = None
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_invalid_lines = 0
        self._stderr: Any = io.BytesIO()

    async def start(self) -> None:
        """Connect. Raises SessionLost if the server does not start, ConfigError if it cannot."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda task: self._ready.set())
        reason = f"did not answer within {START_LIMIT_S:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_LIMIT_S):
                await self._ready.wait()
            if not self._task.done():
                return
            if not self._task.cancelled():
                error = self._task.exception()
                if isinstance(error, ConfigError):
                    raise error
                reason = f"did not start: {_describe_error(error)}"
        lost_error = self._make_lost_error(reason)
        await self.close()
        raise lost_error

    async def _run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            reading, writing = await self._transport(stack)
            client = _import_sdk().ClientSession(reading, writing, message_handler=self._on_message)
            self._session = await stack.enter_async_context(client)
            await self._session.initialize()
            self._tools = await self._list_tools()
            self._ready.set()
            await self._closing.wait()

    async def _on_message(self, message: Any) -> None:
        """Count lines that are not messages, and drop the server if there are too many."""
        self._num_invalid_lines += isinstance(message, Exception)
        if self._num_invalid_lines == _MAX_INVALID_LINES and self._task is not None:
            self._task.cancel()

    async def _transport(self, stack: contextlib.AsyncExitStack) -> tuple[Any, Any]:
        where = f"MCP server {self.name}"
        if self._server.url:
            from mcp.client.streamable_http import streamable_http_client
            from mcp.shared._httpx_utils import create_mcp_http_client

            headers = {key: substitute_env(value, where) for key, value in (self._server.headers or {}).items()}
            client = await stack.enter_async_context(create_mcp_http_client(headers=headers))
            streams: Any = streamable_http_client(substitute_env(self._server.url, where), http_client=client)
            transport = await stack.enter_async_context(streams)
            return transport[0], transport[1]
        from mcp.client.stdio import StdioServerParameters, stdio_client

        # `call` bounds its size; an unread pipe would block the server.
        self._stderr = tempfile.TemporaryFile("ab+", buffering=0)
        # Python's paths are ours, not the server's, and left out.
        names = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")
        env = {key: value for key, value in os.environ.items() if key in names or key.startswith("LC_")}
        env |= {key: substitute_env(value, where) for key, value in (self._server.env or {}).items()}
        parameters = StdioServerParameters(
            command=substitute_env(self._server.command, where),
            args=[substitute_env(argument, where) for argument in self._server.args],
            env=env,
            cwd=self._server.cwd,
            encoding_error_handler="replace",
        )
        stdio: Any = stdio_client(parameters, errlog=self._stderr)  # the SDK only needs its fileno
        read, write = await stack.enter_async_context(stdio)
        return read, write

    async def _list_tools(self) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        cursor = None
        for _ in range(_MAX_PAGES):
            params = _import_sdk().types.PaginatedRequestParams(cursor=cursor)
            page = _dump_model(await self._session.list_tools(params=params))
            tools += page["tools"]
            cursor = page.get("nextCursor")
            if not cursor:
                return tools
        raise self._make_lost_error(f"has more than {_MAX_PAGES} pages of tools")

    def select_tools(self) -> list[dict[str, Any]]:
        """Return the tools that its entry offers. Raises ConfigError for one that the server lacks."""
        available = [tool["name"] for tool in self._tools]
        offered = available if not self._server.tools or "*" in self._server.tools else self._server.tools
        if missing := [name for name in offered if name not in available]:
            tools = ", ".join(available) or "none"
            raise ConfigError(f"MCP server {self.name} has no tool {missing[0]!r}; it has: {tools}")
        return [tool for tool in self._tools if tool["name"] in offered]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        assert self._task is not None
        call_task = asyncio.ensure_future(self._session.call_tool(name, arguments))
        try:
            # A failed transport ends its task, but the call would wait forever.
            await asyncio.wait((call_task, self._task), return_when=asyncio.FIRST_COMPLETED)
            if not call_task.done():
                raise self._make_lost_error("is gone")
            result = _dump_model(call_task.result())
        except (SessionLost, asyncio.CancelledError):
            raise
        except Exception as error:
            if not await self._is_responding():
                raise self._make_lost_error("is gone") from None
            raise ToolFailed(_describe_error(error)) from None
        finally:
            call_task.cancel()
            with contextlib.suppress(OSError, ValueError):
                if self._stderr.seek(0, os.SEEK_END) > _MAX_STDERR_BYTES:
                    self._stderr.truncate(0)
        text = format_result(result)
        if result.get("isError"):
            raise ToolFailed(text or f"the tool {name} failed without an error message")
        return text

    async def _is_responding(self) -> bool:
        """Return whether the server still responds after an error."""
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await self._session.send_ping()
        except Exception as error:
            # A server need not support ping: "method not found" is a response too.
            return getattr(getattr(error, "error", None), "code", None) == -32601
        return True

    def _make_lost_error(self, why: str) -> SessionLost:
        """Return the error with the last line of the server's stderr."""
        if self._num_invalid_lines:
            why += f", and wrote {self._num_invalid_lines} lines that are not MCP messages"
        why = f"MCP server {self.name} {why}"
        with contextlib.suppress(OSError, ValueError):
            self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 2000))
            lines = self._stderr.read().decode(errors="replace").split("\n")
            if messages := [" ".join(line.split()) for line in lines if line.strip()]:
                why += f" ({messages[-1][:300]})"
        return SessionLost(why)

    async def close(self) -> None:
        """Disconnect; the server's process is asked to end, then killed. Raises nothing and never blocks forever."""
        self._closing.set()
        if self._task is None:
            return
        if not self._ready.is_set():
            self._task.cancel()
        await asyncio.wait((self._task,), timeout=END_LIMIT_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=END_LIMIT_S)
        if self._task.done() and not self._task.cancelled():
            self._task.exception()  # already reported, or caused by the shutdown
        self._stderr.close()


def format_result(result: dict[str, Any]) -> str:
    """Return a call result as text. Other content is named in its place, because the policy reads only text."""
    parts = []
    for block in result.get("content") or ():
        kind = block.get("type")
        resource = block.get("resource") or {}
        if kind == "text":
            parts.append(str(block.get("text", "")))
        elif kind == "resource" and "text" in resource:
            parts.append(str(resource["text"]))
        elif kind == "resource_link":
            parts.append(f"[{block.get('name', '')}: {block.get('uri', '')}]")
        else:
            media_type = block.get("mimeType") or resource.get("mimeType") or "of unknown type"
            parts.append(f"[{kind} ({media_type}) is omitted: only text is supported]")
    if not parts and result.get("structuredContent") is not None:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(parts)


def _describe_error(error: BaseException | None) -> str:
    """Format the first error inside a task group's exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None or type(error).__name__ in ("BrokenResourceError", "ClosedResourceError"):  # from anyio
        return "it ended"
    return format_error(error)


def _dump_model(value: Any) -> dict[str, Any]:
    return dict(value.model_dump(mode="json", by_alias=True, exclude_none=True))


def _import_sdk() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise ConfigError(f"needs the official SDK: pip install -e .[mcp] ({error})") from None
    logging.getLogger("mcp").addHandler(logging.NullHandler())
    logging.getLogger("mcp").propagate = False  # it logs a traceback for each invalid line
    return mcp
