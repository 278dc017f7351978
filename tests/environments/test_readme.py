"""The examples of megarl/environments/README.md are short, and run."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from megarl.config import RolloutConfig
from megarl.environments.catalog import load_catalog
from megarl.environments.process_sessions import EnvironmentPool
from megarl.types import Prompt, Reward

sys.path.append(str(Path(__file__).parent))
from openai_stub import serve  # noqa: E402

pytestmark = pytest.mark.alone

PAGE = (Path(__file__).resolve().parents[2] / "megarl/environments/README.md").read_text()
MODULES = dict(re.findall(r"```python (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "openai.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(tmp_path)


CLIENT = """
from types import SimpleNamespace as Namespace
class AsyncOpenAI:
    def __init__(self, base_url, api_key):
        self.chat = Namespace(completions=Namespace(create=self.create))
    async def create(self, model, messages):
        return Namespace(choices=[Namespace(message=Namespace(content=f"It is {len(messages)}."))])
"""


def test_examples_are_short() -> None:
    assert len(MODULES) == 4
    assert all(len([line for line in text.splitlines() if line.strip()]) < 15 for text in MODULES.values())


def test_class_and_tool_examples_run(modules: None) -> None:
    catalog = load_catalog(RolloutConfig(environments=("my_game:Guess",), tools=("my_tools:count_words",)))
    properties = catalog.tools["count_words"].schema["function"]["parameters"]["properties"]
    assert (
        properties["text"] == {"type": "string", "description": "in any language"}
        and properties["longest"]["default"] == 20
    )

    async def play() -> Any:
        async with aclosing(EnvironmentPool(catalog, 60.0, 1)) as sessions:
            session = await sessions.open_session(Prompt("p", ({"role": "user", "content": "Go."},), ground_truth=7))
            results = [
                await session.call("guess", {"number": 7}),
                await session.call("count_words", {"text": "a b"}),
            ]
            return [item.text for item in results], await session.reward("7", (), ["7"])

    assert asyncio.run(play()) == (["right", "2"], Reward(0.99))


def test_agent_example_runs(modules: None) -> None:
    catalog = load_catalog(RolloutConfig(environments=("my_agent:run",)))
    assert catalog.environments["run"].kind == "agent"

    async def run() -> Any:
        async with aclosing(EnvironmentPool(catalog, 60.0, 1)) as sessions:
            prompt = Prompt("p", ({"role": "user", "content": "Go."},), ground_truth="1")
            return await sessions.run_agent(prompt, "http://x", "key")

    assert asyncio.run(run()) == 1.0


def test_program_example_runs_with_the_openai_client(tmp_path: Path) -> None:
    program = tmp_path / "my_program.py"
    program.write_text(MODULES["my_program.py"])
    catalog = load_catalog(RolloutConfig(environments=(f"program:{sys.executable} {program}",)))

    async def run() -> Any:
        requests: list[dict[str, Any]] = []
        async with serve(lambda messages: f"It is {len(messages)}.", requests) as url:
            async with aclosing(EnvironmentPool(catalog, 60.0, 1)) as sessions:
                prompt = Prompt("p", ({"role": "user", "content": "Go."},), ground_truth="1")
                return await sessions.run_agent(prompt, url, "key"), requests[0]["messages"]

    assert asyncio.run(run()) == (1.0, [{"role": "user", "content": "Go."}])
