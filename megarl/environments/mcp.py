"""MCP servers as tools: `mcp:FILE.json`, a file in the format common to MCP clients.

    {"mcpServers": {
        "files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/data"],
                  "env": {"A": "b"}, "tools": ["read_text_file"]},
        "search": {"url": "http://127.0.0.1:8000/mcp", "headers": {"Authorization": "Bearer ${SEARCH_KEY}"}}}}

Each session has its own servers: a process for each `command` (stdio), a client for each `url` (streamable HTTP). The
servers' tools are listed when the session starts. A server's environment variables are PATH, HOME and the like, and
those of its entry; `${NAME}` in a value is read from the session's environment, which has what `rollout.pass_env`
lists.

The SDK is the official one, `mcp`, 1.30 or 2. Only their common API is used; fields that they name differently are read
in wire format.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megarl.config import ConfigError
from megarl.config.paths import substitute_env
from megarl.environments.protocol import SessionLost

START_LIMIT_S = 60.0
"""Timeout for a server to start and list its tools."""
END_LIMIT_S = 8.0
_MAX_PAGES = 100
_MAX_STDERR_BYTES = 1 << 20  # bytes of a server's stderr that are kept
_MAX_INVALID_LINES = 1000  # a server is dropped after this many lines that are not messages
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_KEYS = {"type", "command", "args", "env", "cwd", "url", "headers", "tools", "disabled", "description"}
_IGNORED_KEYS = {"alwaysAllow", "autoApprove", "timeout", "trust", "icon"}
"""Keys that other clients use in the same file."""
_HTTP_TYPES = ("http", "streamable-http", "streamableHttp")


@dataclass(frozen=True)
class ServerConfig:
    """An entry of `mcpServers`, with either `command` or `url`. `tools` lists those to offer; empty means all."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] = ()


def environment(file: str) -> type[McpTools]:
    """Return the class for `mcp:FILE`. Raises ConfigError for an invalid file or a missing SDK."""
    _import_sdk()
    return type("McpTools", (McpTools,), {"servers": read_servers(file)})


def read_servers(file: str) -> tuple[ServerConfig, ...]:
    """Read a file's servers. `${NAME}` is not substituted yet."""
    path = Path(file)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    entries = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise ConfigError(f'{file} must be {{"mcpServers": {{NAME: {{"command": ...}} or {{"url": ...}}}}}}')
    content = [_parse_server(f"server {name}", name, entry) for name, entry in entries.items()]
    servers = tuple(server for server in content if server is not None)
    if not servers:
        raise ConfigError(f"{file} has no enabled server")
    return servers


def _parse_server(where: str, name: str, entry: Any) -> ServerConfig | None:
    def need(fine: bool, what: str) -> None:
        if not fine:
            raise ConfigError(f"{where}: {what}")

    need(isinstance(entry, dict), "must be a mapping")
    need(isinstance(entry.get("disabled", False), bool), "`disabled` must be true or false")
    if entry.get("disabled"):
        return None
    if unknown := sorted(set(entry) - _KEYS - _IGNORED_KEYS):
        need(False, f"has an unknown key {unknown[0]!r}; known keys are {', '.join(sorted(_KEYS))}")
    need(("command" in entry) != ("url" in entry), "needs either `command` or `url`")
    transport = entry.get("type", "stdio" if "command" in entry else "http")
    need(transport != "sse", "is of type sse, which MCP has removed; use its streamable HTTP address")
    is_matching = transport == "stdio" if "command" in entry else transport in _HTTP_TYPES
    need(is_matching, f"is of type {transport!r}, which does not fit `{'command' if 'command' in entry else 'url'}`")
    for key in ("command", "cwd", "url"):
        need(key not in entry or (isinstance(entry[key], str) and bool(entry[key])), f"`{key}` must be text")
    for key in ("args", "tools"):
        fine = isinstance(entry.get(key, []), list) and all(isinstance(item, str) for item in entry.get(key, []))
        need(fine, f"`{key}` must be a list of texts")
    for key in ("env", "headers"):
        mapping = entry.get(key) or {}
        need(
            isinstance(mapping, dict) and all(isinstance(value, str) for value in mapping.values()),
            f"`{key}` must map to text",
        )
    need(
        "url" not in entry or entry["url"].startswith(("http://", "https://")),
        "`url` must begin with http:// or https://",
    )
    return ServerConfig(
        name,
        entry.get("command", ""),
        tuple(entry.get("args", ())),
        dict(entry.get("env") or {}),
        entry.get("cwd"),
        entry.get("url", ""),
        dict(entry.get("headers") or {}),
        () if "*" in entry.get("tools", ()) else tuple(entry.get("tools", ())),
    )


class McpTools:
    """The tools of MCP servers for one session. `environment` makes the class for a spec."""

    servers: tuple[ServerConfig, ...] = ()

    def __init__(self) -> None:
        self._connections: list[Connection] = []
        self._connection_by_tool: dict[str, Connection] = {}
        self._schemas: list[dict[str, Any]] = []

    async def reset(self) -> None:
        """Start the servers and list their tools.

        Raises ConfigError for mistakes in the file, and SessionLost for a server that does not start.
        """
        self._connections = [Connection(server) for server in self.servers]
        await asyncio.gather(*(connection.start() for connection in self._connections))
        for connection in self._connections:
            for tool in connection.select_tools():
                name = tool["name"]
                if name in self._connection_by_tool:
                    first_server, second_server = self._connection_by_tool[name].server.name, connection.server.name
                    subject = (
                        f"server {first_server} has two tools"
                        if first_server == second_server
                        else f"servers {first_server} and {second_server} both have a tool"
                    )
                    raise ConfigError(f"MCP: {subject} of the name {name}; list those to offer in the entry's `tools`")
                self._connection_by_tool[name] = connection
                self._schemas.append(to_openai_schema(tool))

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

    def __init__(self, server: ServerConfig) -> None:
        self.server = server
        self._tools: list[dict[str, Any]] = []
        self._session: Any = None
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_invalid_lines = 0
        self._stderr: BinaryIO = io.BytesIO()

    async def start(self) -> None:
        """Connect. Raises SessionLost if the server does not start, ConfigError if it cannot."""
        self._task = asyncio.create_task(self._run())
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait((self._task, ready), timeout=START_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._ready.is_set():
            return
        reason = f"did not answer within {START_LIMIT_S:g} s"
        if self._task.done() and not self._task.cancelled():
            error = self._task.exception()
            if isinstance(error, ConfigError):
                raise error
            reason = f"did not start: {format_error(error)}"
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
        where = f"MCP server {self.server.name}"
        if self.server.url:
            from mcp.client.streamable_http import streamable_http_client
            from mcp.shared._httpx_utils import create_mcp_http_client

            headers = {key: substitute_env(value, where) for key, value in self.server.headers.items()}
            client = await stack.enter_async_context(create_mcp_http_client(headers=headers))
            streams: Any = streamable_http_client(substitute_env(self.server.url, where), http_client=client)
            transport = await stack.enter_async_context(streams)
            return transport[0], transport[1]
        from mcp.client.stdio import StdioServerParameters, stdio_client

        # Bounded by `_trim`; an unread pipe would block the server.
        self._stderr = tempfile.TemporaryFile("ab+", buffering=0)
        parameters = StdioServerParameters(
            command=substitute_env(self.server.command, where),
            args=[substitute_env(argument, where) for argument in self.server.args],
            env=_build_env() | {key: substitute_env(value, where) for key, value in self.server.env.items()},
            cwd=self.server.cwd,
            encoding_error_handler="replace",
        )
        errlog: Any = self._stderr  # the SDK only needs its fileno
        stdio: Any = stdio_client(parameters, errlog=errlog)
        read, write = await stack.enter_async_context(stdio)
        return read, write

    async def _list_tools(self) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        cursor = None
        for _ in range(_MAX_PAGES):
            page = _dump_model(
                await self._session.list_tools(params=_import_sdk().types.PaginatedRequestParams(cursor=cursor))
            )
            tools += page["tools"]
            cursor = page.get("nextCursor")
            if not cursor:
                return tools
        raise self._make_lost_error(f"has more than {_MAX_PAGES} pages of tools")

    def select_tools(self) -> Iterable[dict[str, Any]]:
        """Yield the tools that its entry offers. Raises ConfigError for one that the server lacks."""
        available = [tool["name"] for tool in self._tools]
        for name in self.server.tools:
            if name not in available:
                raise ConfigError(
                    f"MCP server {self.server.name} has no tool {name!r}; it has: {', '.join(available) or 'none'}"
                )
        for tool in self._tools:
            if self.server.tools and tool["name"] not in self.server.tools:
                continue
            if not _NAME.fullmatch(tool["name"]):
                raise ConfigError(
                    f"MCP server {self.server.name} has a tool {tool['name']!r}, whose name is not 1 to 64 of the "
                    "characters a-zA-Z0-9_.-; list those to offer in the entry's `tools`"
                )
            yield tool

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
            raise ToolFailed(format_error(error)) from None
        finally:
            call_task.cancel()
            self._trim()
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

    def _trim(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._stderr.seek(0, os.SEEK_END) > _MAX_STDERR_BYTES:
                self._stderr.truncate(0)

    def _make_lost_error(self, why: str) -> SessionLost:
        """Return the error with the last line of the server's stderr."""
        if self._num_invalid_lines:
            why += f", and wrote {self._num_invalid_lines} lines that are not MCP messages"
        why = f"MCP server {self.server.name} {why}"
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


def to_openai_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert an MCP tool in wire format to an OpenAI schema."""
    parameters = tool.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


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


def format_error(error: BaseException | None) -> str:
    """Format the first error inside a task group's exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None or type(error).__name__ in ("BrokenResourceError", "ClosedResourceError"):  # from anyio
        return "it ended"
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]


def _build_env() -> dict[str, str]:
    """Return the variables that any program needs. Python's paths are ours, not the server's, and left out."""
    names = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")
    return {key: value for key, value in os.environ.items() if key in names or key.startswith("LC_")}


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
