"""Controllers are found by name, `module:name` or entry point, and their declared requirements are validated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, from_dict, plugins
from megarl.controllers.controller import find_controller, load_requirements, make_controller
from megarl.controllers.grpo import GRPOController
from megarl.types.requirements import Requirements

pytestmark = pytest.mark.alone

HEAD = "from megarl.controllers.controller import Controller\nfrom megarl.controllers.sft import SFTController\n"


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Write a custom module of controllers, unloaded after the test."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str, name: str = "lab_controllers") -> None:
        (tmp_path / f"{name}.py").write_text(HEAD + text)

    yield write
    sys.modules.pop("lab_controllers", None)


def requirements_of(name: str, **sections: Any) -> Requirements:
    return load_requirements(from_dict({"algorithm": name, **sections}))


def test_requirements_of_built_in_algorithms() -> None:
    reference = ("rollout", "actor", "reference")
    assert requirements_of("ppo") == Requirements(
        "ppo", "prompts", (*reference, "critic", "reward"), ("actor", "critic"), is_off_policy=True
    )
    grpo = requirements_of("grpo", kl={"apply_to": "none"})
    assert grpo.roles == ("rollout", "actor", "reward") and grpo.is_group_relative and grpo.is_off_policy
    assert grpo.has_rollout and grpo.main_role == "actor" and not grpo.has_scalar_head
    assert requirements_of("sft") == Requirements("sft", "conversations", ("actor",), ("actor",))
    pairs = requirements_of("reward_model")
    assert pairs == Requirements("reward_model", "pairs", ("reward_model",), ("reward_model",), has_scalar_head=True)
    assert not pairs.has_rollout and pairs.main_role == "reward_model"


def test_finds_a_controller_by_module_and_name(write_module: Any) -> None:
    write_module("class Mine(SFTController):\n    is_group_relative = True\n")
    config = from_dict({"algorithm": "lab_controllers:Mine"})
    result = load_requirements(config)
    assert result == Requirements(
        "lab_controllers:Mine", "conversations", ("actor",), ("actor",), is_group_relative=True
    )
    assert type(make_controller(config)).__name__ == "Mine"


def test_finds_a_controller_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("lab_po", "megarl.controllers.grpo:GRPOController", "megarl.controllers")
    monkeypatch.setattr(plugins, "list_entry_points", lambda group: {"lab_po": point} if group == point.group else {})
    assert find_controller("lab_po") is GRPOController and requirements_of("lab_po").name == "lab_po"
    with pytest.raises(
        ConfigError, match=r"one of ppo, .*, reward_model, .*, generate, lab_po, or .*did you mean lab_po\?"
    ):
        find_controller("labpo")


def test_list_entry_points_filters_by_group() -> None:
    assert (
        "pytest" in plugins.list_entry_points("console_scripts") and plugins.list_entry_points("megarl.nothing") == {}
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "ppoo",
            "",
            r"^algorithm must be one of ppo, .*, or module:name of a Controller, not 'ppoo'; did you mean",
        ),
        ("", "", r"^algorithm must be one of .*, not ''$"),
        ("no_such_lab:Mine", "", r"^algorithm: cannot import no_such_lab of .*No module named 'no_such_lab'$"),
        (":Mine", "", r"^algorithm: ':Mine' is not of the form module:name$"),
        ("lab_controllers:Mine", "1 / 0", r"cannot import lab_controllers of .*ZeroDivisionError: division by zero$"),
        ("lab_controllers:Mine", "import sys; sys.exit(3)", r"cannot import lab_controllers of .*SystemExit: 3$"),
        ("lab_controllers:Mine", "", r"lab_controllers has no 'Mine'; it has no function or class$"),
        ("lab_controllers:Mine", "Mine = 3", r"Mine is a int, not a Controller: derive it from megarl\.controllers"),
        ("lab_controllers:Mine", "class Mine: ...", r"Mine is another class, not a Controller"),
        ("lab_controllers:Mine", "class Mine(Controller): ...", r"Mine lacks load_items, roles, step, which every"),
        (
            "lab_controllers:Mine",
            "class Mine(SFTController):\n    item = 'games'",
            r"item must be one of prompts, conv",
        ),
        (
            "lab_controllers:Mine",
            "class Mine(SFTController):\n    def roles(self): return ('actor',)\n    trained_roles = ()",
            r"Mine trains nothing, and generates nothing: name a role in `trained_roles`$",
        ),
        (
            "lab_controllers:Mine",
            "class Mine(SFTController):\n    trained_roles = ('critic',)",
            r"Mine\.trained_roles names critic, which its roles do not list \(they are actor\)$",
        ),
        (
            "lab_controllers:Mine",
            "class Mine(SFTController):\n    @classmethod\n    def roles(cls, config): return config.nothing",
            r"Mine\.roles\(config\) raised AttributeError: .*nothing",
        ),
        (
            "lab_controllers:Mine",
            "class Mine(SFTController):\n    @classmethod\n    def roles(cls, config): return ('actor', 'a b')",
            r"roles\(config\) gives \('actor', 'a b'\), not a tuple of names of roles$",
        ),
        (
            "lab_controllers:Mine",
            "class Mine(SFTController):\n    @classmethod\n    def roles(cls, config): return ('actor', 'actor')",
            r"lists actor twice; name it once$",
        ),
        (
            "lab_controllers:Mine",
            "class Mine(SFTController):\n    trained_roles = ('rollout',)\n"
            "    @classmethod\n    def roles(cls, config): return ('rollout',)",
            r"lists the role rollout, whose weights are the actor's, but no actor$",
        ),
    ],
)
def test_invalid_custom_controllers_raise(write_module: Any, name: str, text: str, message: str) -> None:
    write_module(text)
    with pytest.raises(ConfigError, match=message) as error:
        requirements_of(name)
    assert "\n" not in str(error.value)


OPTIONS = """
from dataclasses import dataclass
from typing import Annotated
from megarl.config.strict import Range
@dataclass(frozen=True)
class MyOptions:
    share: Annotated[float, Range(0, 1)] = 0.5
class Mine(SFTController):
    Options = MyOptions
"""


def test_algorithm_options_are_validated(write_module: Any) -> None:
    write_module(OPTIONS)
    controller = make_controller(from_dict({"algorithm": "lab_controllers:Mine", "options": {"share": 1}}))
    assert controller.options.share == 1.0
    for options, message in (({"shore": 1}, r"options\.shore.*share"), ({"share": 2}, r"options\.share .*at most 1")):
        with pytest.raises(ConfigError, match=message):
            requirements_of("lab_controllers:Mine", options=options)
    with pytest.raises(ConfigError, match=r"options\.share"):
        requirements_of("sft", options={"share": 1})
