"""Environments of the real verifiers package, played against a server that speaks OpenAI's API."""

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
OF_UV = ("UV_CACHE_DIR", "UV_INDEX_URL", "SSL_CERT_FILE")
VERSION = tuple(map(int, importlib.metadata.version("verifiers").split(".")[:2]))
classic = pytest.mark.skipif(VERSION >= (0, 4), reason="this version of verifiers has no load_environment")
task_sets = pytest.mark.skipif(
    shutil.which("uv") is None, reason="verifiers.v1 starts its agents by uv, which is absent"
)


def echo(messages: list[dict[str, Any]]) -> str:
    """What was asked for; zero is refused."""
    assert not messages[-1]["content"].endswith("0"), "zero"
    return str(messages[-1]["content"]).removeprefix("Say ").removeprefix("Again: ")


def prompts_of(spec: str, folder: Path, evaluation: bool = False) -> list[Prompt]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in adapter.rows(spec, evaluation)))
    return list(read_prompts(file))


def played(spec: str, prompts: list[Prompt], answer: openai_stub.Answer = echo) -> tuple[Any, Any]:
    """What the episodes came to, or why they were lost, one after the other in a process; what the policy was asked."""
    requested: list[dict[str, Any]] = []

    async def run() -> list[Any]:
        known = load_catalog(RolloutConfig(environments=(f"verifiers:{spec}",), pass_env=OF_UV))
        limits = ProcessLimits(pass_env=OF_UV)
        async with (
            openai_stub.served(answer, requested) as url,
            aclosing(EnvironmentPool(known, 60.0, 2, limits=limits)) as sessions,
        ):
            return [await one(sessions, prompt, url) for prompt in prompts]

    async def one(sessions: EnvironmentPool, prompt: Prompt, url: str) -> Any:
        try:
            return await sessions.run_agent(prompt, url, "key", 240.0)
        except SessionLost as error:
            return str(error)

    return asyncio.run(run()), requested


@classic
def test_a_classic_environment(tmp_path: Path) -> None:
    spec = 'classic_greeting{"word": "hey"}'
    prompts = prompts_of(spec, tmp_path)
    assert [prompt.ground_truth for prompt in prompts] == ["hey 0", "hey 1", "hey 2"]
    assert prompts[1].messages[-1] == {"role": "user", "content": "Say hey 1"}
    (lost, *result), requested = played(spec, prompts)
    assert lost.startswith(f"{spec}: it raised RuntimeError: ") and "InternalServerError" in lost
    assert result == [
        {"reward": 2.0, "parts": {"exact": 2.0, "said": 2.0, "num_turns": 2.0}},
        {"reward": 3.0, "parts": {"exact": 3.0, "said": 2.0, "num_turns": 2.0}},
    ]
    first = [message["content"] for message in requested[2]["messages"]]
    assert first == ["Be brief.", "Say hey 1", "hey 1", "Again: hey 1"]
    assert [prompt.ground_truth for prompt in prompts_of(spec, tmp_path, evaluation=True)] == ["hey 9"]


@classic
def test_rewards_of_whole_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="rewards a group as a whole; episodes are scored one by one"):
        adapter.environment('classic_greeting{"group": true}')


@task_sets
def test_a_task_set(tmp_path: Path) -> None:
    prompts = prompts_of("greeting-tasks", tmp_path)
    assert [prompt.ground_truth for prompt in prompts] == ["hello 0", "hello 1", "hello 2"]
    assert build_row(prompts[1])["verifiers"]["prompt"] == "Say hello 1"
    result, requested = played("greeting-tasks", prompts[1:], lambda messages: "hello 1")
    assert result == [{"reward": right, "parts": {"length": 7.0, "exact": right}} for right in (1.0, 0.0)]
    assert [body["messages"][-1]["content"] for body in requested] == ["Say hello 1", "Say hello 2"]


@task_sets
def test_a_harness_that_runs_programs_on_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="its harness runs the policy's code on this machine"):
        adapter.environment('greeting_tasks{"agent": {"harness": {"id": "bash"}}}')


@pytest.mark.parametrize(
    "spec, said",
    [
        ("no_such_environment", "no module no_such_environment; install the environment on this machine"),
        ('classic_greeting{"word"', "the text after classic_greeting is not JSON"),
    ],
)
def test_environments_that_are_none(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        adapter.environment(spec)


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match="needs the package verifiers: pip install --no-deps -r launch"):
        adapter.environment("classic_greeting")
