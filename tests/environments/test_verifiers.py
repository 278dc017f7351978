"""Environments of the verifiers package against a stub of OpenAI's API."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import shutil
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import openai_stub
import pytest

from megarl.config import ConfigError, RolloutConfig
from megarl.data.datasets import read_prompts
from megarl.environments import verifiers as adapter
from megarl.environments.catalog import build_row, load_catalog
from megarl.environments.process_sessions import EnvironmentPool
from megarl.environments.protocol import SessionLost
from megarl.processes.children import ProcessLimits
from megarl.types import Prompt

pytestmark = [pytest.mark.alone, pytest.mark.slow]

pytest.importorskip("verifiers", reason="the package verifiers is not installed, see launch/requirements-verifiers.txt")
UV_VARIABLES = ("UV_CACHE_DIR", "UV_INDEX_URL", "SSL_CERT_FILE")
VERSION = tuple(map(int, importlib.metadata.version("verifiers").split(".")[:2]))
needs_classic_api = pytest.mark.skipif(VERSION >= (0, 4), reason="this version of verifiers has no load_environment")
needs_uv = pytest.mark.skipif(
    shutil.which("uv") is None, reason="verifiers.v1 starts its agents by uv, which is absent"
)


def echo(messages: list[dict[str, Any]]) -> str:
    """Return the requested text, but fail for zero."""
    assert not messages[-1]["content"].endswith("0"), "zero"
    return str(messages[-1]["content"]).removeprefix("Say ").removeprefix("Again: ")


def read_rows(spec: str, folder: Path, evaluation: bool = False) -> list[Prompt]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in adapter.rows(spec, evaluation)))
    return list(read_prompts(file))


def run_episodes(spec: str, prompts: list[Prompt], answer: openai_stub.Answer = echo) -> tuple[Any, Any]:
    """Run episodes one by one; return their results or reasons of loss, and the requests to the policy."""
    requests: list[dict[str, Any]] = []

    async def run() -> list[Any]:
        catalog = load_catalog(RolloutConfig(environments=(f"verifiers:{spec}",), pass_env=UV_VARIABLES))
        limits = ProcessLimits(pass_env=UV_VARIABLES)
        async with (
            openai_stub.serve(answer, requests) as url,
            aclosing(EnvironmentPool(catalog, 60.0, 2, limits=limits)) as sessions,
        ):
            return [await run_episode(sessions, prompt, url) for prompt in prompts]

    async def run_episode(sessions: EnvironmentPool, prompt: Prompt, url: str) -> Any:
        try:
            return await sessions.run_agent(prompt, url, "key")
        except SessionLost as error:
            return str(error)

    return asyncio.run(run()), requests


@needs_classic_api
def test_runs_classic_environments(tmp_path: Path) -> None:
    spec = 'classic_greeting{"word": "hey"}'
    prompts = read_rows(spec, tmp_path)
    assert [prompt.ground_truth for prompt in prompts] == ["hey 0", "hey 1", "hey 2"]
    assert prompts[1].messages[-1] == {"role": "user", "content": "Say hey 1"}
    (failure, *result), requests = run_episodes(spec, prompts)
    assert failure.startswith(f"{spec}: it raised RuntimeError: ") and "InternalServerError" in failure
    assert result == [
        {"reward": 2.0, "parts": {"exact": 2.0, "num_replies": 2.0, "num_turns": 2.0}},
        {"reward": 3.0, "parts": {"exact": 3.0, "num_replies": 2.0, "num_turns": 2.0}},
    ]
    first = [message["content"] for message in requests[2]["messages"]]
    assert first == ["Be brief.", "Say hey 1", "hey 1", "Again: hey 1"]
    assert [prompt.ground_truth for prompt in read_rows(spec, tmp_path, evaluation=True)] == ["hey 9"]


@needs_classic_api
def test_refuses_group_rewards() -> None:
    with pytest.raises(ConfigError, match="rewards a group as a whole; episodes are scored one by one"):
        adapter.environment('classic_greeting{"group": true}')


@needs_uv
def test_runs_task_sets(tmp_path: Path) -> None:
    prompts = read_rows("greeting-tasks", tmp_path)
    assert [prompt.ground_truth for prompt in prompts] == ["hello 0", "hello 1", "hello 2"]
    assert build_row(prompts[1])["verifiers"]["prompt"] == "Say hello 1"
    result, requests = run_episodes("greeting-tasks", prompts[1:], lambda messages: "hello 1")
    assert result == [
        {"reward": exact_reward, "parts": {"length": 7.0, "exact": exact_reward}} for exact_reward in (1.0, 0.0)
    ]
    assert [body["messages"][-1]["content"] for body in requests] == ["Say hello 1", "Say hello 2"]


@needs_uv
def test_refuses_harnesses_that_run_local_programs() -> None:
    with pytest.raises(ConfigError, match="its harness runs the policy's code on this machine"):
        adapter.environment('greeting_tasks{"agent": {"harness": {"id": "bash"}}}')


@pytest.mark.parametrize(
    "spec, message",
    [
        ("no_such_environment", "no module no_such_environment; install the environment on this machine"),
        ('classic_greeting{"word"', "the text after classic_greeting is not JSON"),
    ],
)
def test_refuses_unknown_environments(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapter.environment(spec)


def test_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match="needs the package verifiers: pip install --no-deps -r launch"):
        adapter.environment("classic_greeting")
