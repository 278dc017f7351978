"""Adapters for MCP, Harbor and agents in session processes, as in a run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import yaml
from sync_sandbox import needs_bubblewrap
from test_harbor import SOLUTION, write_task

from megarl.config import ConfigError, RolloutConfig, from_dict
from megarl.environments import mcp
from megarl.environments.catalog import load_catalog
from megarl.environments.process_sessions import EnvironmentPool, EnvironmentSession
from megarl.environments.protocol import SessionLost
from megarl.types import Prompt, Reward

pytestmark = pytest.mark.alone

USER = {"role": "user", "content": "Go."}
SERVER = str(Path(__file__).with_name("mcp_server.py"))


def run_with_pool(work: Callable[[EnvironmentPool], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        async with aclosing(EnvironmentPool(load_catalog(RolloutConfig(**settings)), 60.0, 1)) as sessions:
            return await work(sessions)

    return asyncio.run(run())


def prompt(**extra: Any) -> Prompt:
    return Prompt("p", (USER,), extra=extra)


@pytest.fixture
def servers(tmp_path: Path) -> str:
    pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install -e .[mcp]")
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": {"one": {"command": sys.executable, "args": [SERVER]}}}))
    return f"mcp:{file}"


def is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_exited(process: str) -> bool:
    for _ in range(100):
        if not is_running(process):
            return True
        time.sleep(0.05)
    return False


async def call_tool(session: EnvironmentSession, name: str, **arguments: Any) -> str:
    return (await session.call(name, arguments)).text


def test_mcp_servers_as_stateless_tools(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_SECRET", "secret")

    async def work(sessions: EnvironmentPool) -> list[str]:
        session = await sessions.open_session(prompt())
        assert "add" in [schema["function"]["name"] for schema in session.schemas]
        result = [await call_tool(session, "add", a=2, b=3), await call_tool(session, "environment")]
        result += [await call_tool(session, "fails"), await call_tool(session, "add", a="x", b=1)]
        result += [
            await call_tool(session, "process"),
            await call_tool(session, "dies"),
            await call_tool(session, "process"),
        ]
        session.close()
        return result

    five, environment, fails, misused, before, crash, after = run_with_pool(work, tools=(servers,))
    assert five == "5" and "secret" not in environment
    assert fails.startswith("Error: ") and misused == "Error: argument a must be of type integer"
    assert crash == "Error: MCP server one is gone (fatal: out of luck)"
    assert before != after and wait_until_exited(before) and wait_until_exited(after)  # a new server replaced it


def test_mcp_servers_as_an_environment(servers: str) -> None:
    async def work(sessions: EnvironmentPool) -> list[str]:
        first_session, second_session = [await sessions.open_session(prompt()) for _ in range(2)]
        result = [
            await call_tool(first_session, "count"),
            await call_tool(first_session, "count"),
            await call_tool(second_session, "count"),
        ]
        result += [await call_tool(first_session, "process"), await call_tool(second_session, "process")]
        with pytest.raises(SessionLost, match=r"MCP server one is gone \(fatal: out of luck\)"):
            await first_session.call("dies", {})
        assert await call_tool(second_session, "add", a=1, b=1) == "2"
        first_session.close()
        second_session.close()
        return result

    *counts, first, second = run_with_pool(work, environments=(servers,))
    assert counts == ["1", "2", "1"]
    assert first != second and wait_until_exited(first) and wait_until_exited(second)


def test_names_mcp_servers_that_do_not_start(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install -e .[mcp]")
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": {"one": {"command": "/no/such"}}}))
    message = f"rollout.tools: mcp:{file} cannot be started: .*MCP server one did not start: .*/no/such"
    with pytest.raises(ConfigError, match=message):
        load_catalog(RolloutConfig(tools=(f"mcp:{file}",)))


@needs_bubblewrap
def test_harbor_tasks_as_an_environment(tmp_path: Path) -> None:
    for name in ("greet", "more/greet"):
        write_task(tmp_path / name)

    async def work(sessions: EnvironmentPool) -> list[Any]:
        result = []
        for command in (SOLUTION, "echo no > greeting.txt"):
            session = await sessions.open_session(prompt(task="more/greet"))
            assert [schema["function"]["name"] for schema in session.schemas] == ["bash"]
            assert await call_tool(session, "bash", command=command) == ""
            result.append(await session.reward("", (USER,), ["done"]))
            session.close()
        return result

    spec = f"harbor:{tmp_path}"
    assert run_with_pool(work, environments=(spec,)) == [Reward(1.0, {"tidy": 0.5}), Reward(0.0, {"tidy": 0.5})]
    with pytest.raises(ConfigError, match="has no column 'task', which reset of harbor:"):
        load_catalog(RolloutConfig(environments=(spec,))).find_environment(prompt())


def test_names_harbor_tasks_without_a_verifier(tmp_path: Path) -> None:
    write_task(tmp_path / "greet", verifier=None)
    with pytest.raises(ConfigError, match=f"rollout.environments: harbor:{tmp_path}: task greet: has no verifier"):
        load_catalog(RolloutConfig(environments=(f"harbor:{tmp_path}",)))


def test_page_examples_are_valid(tmp_path: Path) -> None:
    page = (Path(mcp.__file__).parent / "ADAPTERS.md").read_text(encoding="utf-8")
    (servers,) = re.findall(r"```json servers.json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "servers.json").write_text(servers)
    files, search = mcp.read_servers(str(tmp_path / "servers.json")).values()
    assert (files.command, files.tools, search.url) == ("npx", ["read_text_file"], "http://127.0.0.1:8000/mcp")
    configs = [yaml.safe_load(text) for text in re.findall(r"```yaml config\n(.*?)```", page, re.DOTALL)]
    result = [from_dict(config).rollout for config in configs]
    assert [item.tools + item.environments for item in result] == [
        ("mcp:servers.json",),
        ("verifiers:wordle",),
        ("harbor:tasks",),
    ]


def test_agents_reuse_their_process_until_they_raise() -> None:
    async def work(sessions: EnvironmentPool) -> list[Any]:
        result: list[Any] = []
        for behavior in ("", "", "raises", ""):
            try:
                result.append(await sessions.run_agent(prompt(how=behavior), "http://x", "key"))
            except SessionLost as error:
                result.append(str(error))
        return result

    first, second, failure, after_failure = run_with_pool(work, environments=("counting_agents:counting",))
    assert (first["reward"], second["reward"], after_failure["reward"]) == (1, 2, 1)
    assert first["parts"] == second["parts"] != after_failure["parts"]
    assert "it raised AssertionError" in failure
