"""MCP servers as tools: servers of the official SDK over stdio and HTTP, and broken servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.environments import mcp as adapter
from megarl.environments.protocol import SessionLost

pytestmark = pytest.mark.alone

pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install 'mcp>=1.30'")
SERVER = str(Path(__file__).with_name("mcp_server.py"))
TOOLS = ["add", "count", "process", "environment", "header", "picture", "fails", "hangs", "dies"]
STDIO = {"command": sys.executable, "args": [SERVER]}


def python_server(code: str) -> dict[str, Any]:
    return {"command": sys.executable, "args": ["-c", code]}


@pytest.fixture
def run_session(tmp_path: Path) -> Callable[..., Any]:
    """Run `call_tools(session)` in a session whose servers are the entries."""

    def run(call_tools: Callable[[adapter.McpTools], Awaitable[Any]] | None, **entries: Any) -> Any:
        file = tmp_path / "servers.json"
        file.write_text(json.dumps({"mcpServers": entries}))

        async def session() -> Any:
            tools = adapter.environment(str(file))()
            try:
                await tools.reset()
                return await call_tools(tools) if call_tools is not None else None
            finally:
                await tools.close()

        return asyncio.run(session())

    return run


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


async def call_failing(session: adapter.McpTools, name: str, **arguments: Any) -> str:
    with pytest.raises(adapter.ToolFailed) as error:
        await session.call(name, arguments)
    return str(error.value)


def test_runs_sessions_over_stdio(run_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_SECRET", "secret")
    monkeypatch.setenv("PASSED", "seven")

    async def call_tools(session: adapter.McpTools) -> tuple[int, str]:
        schemas = session.tools()
        assert [schema["function"]["name"] for schema in schemas] == TOOLS
        assert schemas[0]["type"] == "function" and schemas[0]["function"]["description"] == "Add two numbers."
        assert schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
        assert await session.call("add", {"a": 2, "b": 3}) == "5"
        # The server keeps state, for this session alone.
        assert [await session.call("count", {}) for _ in range(2)] == ["1", "2"]
        assert await session.call("picture", {}) == "a dot\n[image (image/png) is omitted: only text is supported]"
        assert "fails" in await call_failing(session, "fails")
        assert "valid integer" in await call_failing(session, "add", a="x", b=1)
        assert await session.call("count", {}) == "3"
        return int(await session.call("process", {})), await session.call("environment", {})

    process, environment = run_session(call_tools, one=STDIO | {"env": {"A": "b", "B": "${PASSED}"}})
    assert "A=b" in environment and "B=seven" in environment and "PATH=" in environment
    assert "secret" not in environment and "PASSED" not in environment
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_runs_sessions_over_http(run_session: Callable[..., Any], url: str) -> None:
    async def call_tools(session: adapter.McpTools) -> int:
        assert [schema["function"]["name"] for schema in session.tools()] == TOOLS
        assert await session.call("add", {"a": 2, "b": 3}) == "5"
        assert await session.call("header", {"name": "x-key"}) == "k"
        assert "fails" in await call_failing(session, "fails")
        return int(await session.call("process", {}))

    entry = {"type": "http", "url": url, "headers": {"X-Key": "k"}}
    assert run_session(call_tools, one=entry) == run_session(call_tools, one=entry)  # the server outlives sessions


def test_a_server_that_dies_loses_the_session(run_session: Callable[..., Any]) -> None:
    async def call_tools(session: adapter.McpTools) -> None:
        for name in ("dies", "count"):
            with pytest.raises(SessionLost, match=r"MCP server one is gone \(fatal: out of luck\)"):
                await session.call(name, {})

    run_session(call_tools, one=STDIO)


def test_a_killed_server_loses_the_session(run_session: Callable[..., Any]) -> None:
    async def call_tools(session: adapter.McpTools) -> None:
        os.kill(int(await session.call("process", {})), signal.SIGKILL)
        with pytest.raises(SessionLost, match="MCP server one is gone"):
            await session.call("count", {})

    run_session(call_tools, one=STDIO)


def test_closing_the_session_ends_hanging_calls(run_session: Callable[..., Any]) -> None:
    async def call_tools(session: adapter.McpTools) -> int:
        process = int(await session.call("process", {}))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.call("hangs", {}), 0.5)
        assert await session.call("count", {}) == "1"  # the timeout does no harm
        asyncio.ensure_future(session.call("hangs", {})).add_done_callback(lambda call: call.exception())
        await asyncio.sleep(0.1)
        return process

    process = run_session(call_tools, one=STDIO)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"command": "/no/such"}, "one did not start: FileNotFoundError: .*'/no/such'"),
        ({"url": "http://127.0.0.1:1/mcp"}, "one did not start: ConnectError"),
        (
            python_server("import sys; print('hello'); sys.exit('no key')"),
            r"wrote 1 lines that are not MCP messages \(no key\)",
        ),
        (python_server("while True: print('hello')"), "wrote 100. lines that are not MCP messages"),
        (python_server("import sys; sys.exit(2)"), "one did not start"),
        ({"command": "cat"}, "one did not start"),  # echoes requests
        (python_server("import time; print('{}', flush=True); time.sleep(60)"), "one did not answer within 3 s"),
    ],
)
def test_reports_servers_that_do_not_start(
    run_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(adapter, "START_LIMIT_S", 3.0)
    with pytest.raises(SessionLost, match=message):
        run_session(None, one=entry)


def test_duplicate_tool_names_need_a_selection(run_session: Callable[..., Any]) -> None:
    async def names(session: adapter.McpTools) -> list[str]:
        return [schema["function"]["name"] for schema in session.tools()]

    with pytest.raises(ConfigError, match="servers one and two both have a tool of the name add; list those to offer"):
        run_session(names, one=STDIO, two=STDIO)
    chosen = run_session(names, one=STDIO | {"tools": ["count"]}, two=STDIO | {"tools": ["add", "fails"]})
    assert chosen == ["count", "add", "fails"]
    with pytest.raises(ConfigError, match="MCP server one has no tool 'ad'; it has: add, count"):
        run_session(names, one=STDIO | {"tools": ["ad"]})


def test_formats_content_other_than_text() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "audio", "data": "", "mimeType": "audio/wav"},
        {"type": "resource", "resource": {"uri": "file:///a", "text": "b"}},
        {"type": "resource", "resource": {"uri": "file:///b", "blob": "", "mimeType": "application/pdf"}},
        {"type": "resource_link", "name": "c", "uri": "file:///c"},
    ]
    audio, pdf = (
        f"[{kind} is omitted: only text is supported]" for kind in ("audio (audio/wav)", "resource (application/pdf)")
    )
    assert adapter.format_result({"content": content}) == f"a\n{audio}\nb\n{pdf}\n[c: file:///c]"
    assert adapter.format_result({"content": [], "structuredContent": {"result": 5}}) == '{"result": 5}'
    assert adapter.format_result({}) == ""


@pytest.mark.parametrize(
    "entry, message",
    [
        ([], "must be a mapping"),
        ({}, "needs either `command` or `url`"),
        ({"command": "a", "url": "http://b"}, "needs either `command` or `url`"),
        ({"command": "a", "arg": ["b"]}, "has an unknown key 'arg'; known keys are args, command, cwd"),
        ({"command": ["a"]}, "`command`: Input should be a valid string"),
        ({"command": "a", "args": "b"}, "`args`: Input should be a valid list"),
        ({"command": "a", "env": {"A": 1}}, "`env`: `A`: Input should be a valid string"),
        ({"command": "a", "type": "http"}, "is of type 'http', which does not fit `command`"),
        ({"url": "http://a", "type": "sse"}, "is of type sse, which MCP has removed"),
        ({"url": "a:1"}, "`url`: String should match pattern .\\^https"),
        ({"command": "a", "disabled": True}, "has no enabled server"),
    ],
)
def test_refuses_invalid_entries(tmp_path: Path, entry: Any, message: str) -> None:
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": {"one": entry}}))
    with pytest.raises(ConfigError, match=message):
        adapter.read_servers(str(file))


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("[]", "must be {"),
        ('{"mcpServers": {}}', "has no enabled server"),
        (None, "cannot be read"),
    ],
)
def test_refuses_invalid_files(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "servers.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        adapter.read_servers(str(file))


def test_names_unset_variables(run_session: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"MCP server one: \$\{NO_SUCH\} is not set; name it in rollout.pass_env"):
        run_session(None, one={"command": "cat", "env": {"A": "${NO_SUCH}"}})
