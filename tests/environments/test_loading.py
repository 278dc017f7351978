"""Load environments and tools, and describe their classes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import toy_environments

from megarl.config import RolloutConfig
from megarl.config.strict import ConfigError
from megarl.environments.catalog import load_catalog
from megarl.environments.loading import ENVIRONMENTS_KEY, TOOLS_KEY, build_schemas, load
from megarl.environments.protocol import EnvironmentInfo
from megarl.types import Prompt

pytestmark = pytest.mark.alone


def load_info(name: str) -> EnvironmentInfo:
    return load(f"toy_environments:{name}", ENVIRONMENTS_KEY).info


def test_describes_environments_and_agents() -> None:
    guess_info = load_info("Guess")
    assert (guess_info.kind, guess_info.name, guess_info.has_dynamic_tools, guess_info.has_reward) == (
        "environment",
        "Guess",
        False,
        True,
    )
    assert (guess_info.required_columns, guess_info.accepted_columns) == (
        ("ground_truth",),
        ("ground_truth", "data_source"),
    )
    assert guess_info.reward_arguments == ("answer", "turns") and not guess_info.is_async and guess_info.timeout == 0
    plain_info = load_info("Plain")
    assert (plain_info.required_columns, plain_info.accepted_columns, plain_info.has_reward) == ((), (), False)
    odd_info = load_info("Odd")
    assert (odd_info.required_columns, odd_info.accepted_columns, odd_info.timeout) == (("ground_truth",), None, 2.0)
    assert [schema["function"]["name"] for schema in odd_info.schemas] == ["act", "pid"]
    assert load_info("Waits").is_async and load_info("Found").has_dynamic_tools and load_info("Found").schemas == ()
    agent = load_info("agent")
    assert (agent.kind, agent.has_reward, agent.is_async, agent.schemas) == ("agent", True, True, ())


def test_finds_inherited_static_and_class_methods() -> None:
    class Child(toy_environments.Plain):
        @staticmethod
        def twice(x: int) -> int:
            """Double it."""
            return 2 * x

        @classmethod
        def describe(cls, x: str = "") -> str:
            """Return the name of the class."""
            return cls.__name__ + x

        helper = len

    toy_environments.Child = Child  # type: ignore[attr-defined]
    schemas = {item["function"]["name"]: item["function"]["parameters"] for item in load_info("Child").schemas}
    assert list(schemas) == ["count", "twice", "describe"]
    assert list(schemas["twice"]["properties"]) == ["x"] and schemas["describe"]["required"] == []


class Machine:
    def turn(self, wheel: int) -> str:
        """Turn a wheel."""
        return str(wheel)

    def pull(self) -> str:
        """Pull the lever."""
        return "clank"


class LoudMachine(Machine):
    def shout(self) -> str:
        """Shout."""
        return "!"

    def pull(self) -> str:
        """Pull the lever with a bang."""
        return "bang"

    def alarm(self) -> str:
        """Raise an alarm."""
        return "?"


def test_lists_tools_in_order_of_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_environments, "LoudMachine", LoudMachine, raising=False)
    schemas = load_info("LoudMachine").schemas
    functions = [(schema["function"]["name"], schema["function"]["description"]) for schema in schemas]
    assert functions == [
        ("turn", "Turn a wheel."),
        ("pull", "Pull the lever with a bang."),
        ("shout", "Shout."),
        ("alarm", "Raise an alarm."),
    ]


def test_builds_the_schemas_of_a_run() -> None:
    """Rows for SFT need the schemas that prompts of RL list, in their order."""
    catalog = load_catalog(RolloutConfig(environments=("toy_environments:Odd",)))
    prompt = Prompt("p", ({"role": "user", "content": "Go."},), ground_truth="x")
    assert build_schemas(toy_environments.Odd) == catalog.select_schemas(prompt)
    assert [schema["function"]["name"] for schema in build_schemas(Machine)] == ["turn", "pull"]
    with pytest.raises(ConfigError, match="the tools of toy_environments:Found are known only at run time"):
        build_schemas(toy_environments.Found)


@pytest.mark.parametrize("key", [TOOLS_KEY, ENVIRONMENTS_KEY])
def test_loads_adapters_by_prefix(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    paths: list[str] = []

    def environment(path: str) -> Any:
        paths.append(path)
        return toy_environments.Found

    monkeypatch.setitem(sys.modules, "megarl.environments.mcp", SimpleNamespace(environment=environment))
    result = load("mcp:some/file.json:x", key)
    assert result.target is toy_environments.Found and paths == ["some/file.json:x"]
    assert (result.info.name, result.info.has_dynamic_tools) == ("some/file.json:x", True)
    assert result.info.kind == ("tools" if key == TOOLS_KEY else "environment")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("no such file"), "rollout.environments: mcp:x: no such file"),
        (ImportError("no module mcp"), "rollout.environments: mcp:x cannot be loaded: ImportError: no module mcp"),
        (SystemExit(3), "rollout.environments: mcp:x cannot be loaded: SystemExit: 3"),
    ],
)
def test_adapter_errors_name_the_spec(monkeypatch: pytest.MonkeyPatch, error: BaseException, message: str) -> None:
    def environment(path: str) -> Any:
        raise error

    monkeypatch.setitem(sys.modules, "megarl.environments.mcp", SimpleNamespace(environment=environment))
    with pytest.raises(ConfigError, match=message):
        load("mcp:x", ENVIRONMENTS_KEY)


def test_loads_functions_as_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: int) -> int:
        """Double it."""
        return 2 * x

    monkeypatch.setattr(toy_environments, "double", double, raising=False)
    result = load("toy_environments:double", TOOLS_KEY)
    assert result.target.function is double and result.target.schema == result.info.schemas[0]
    assert result.info.kind == "tools" and result.info.name == "double"
    with pytest.raises(
        ConfigError, match="rollout.tools: toy_environments:Guess is a type: name a class in rollout.env"
    ):
        load("toy_environments:Guess", TOOLS_KEY)
