"""The control file: changes apply from the next step; an invalid file is reported once and changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.observe.control import Control
from megarl.rewards.reward_settings import check_weights

pytestmark = pytest.mark.alone


class ControlHarness:
    """A `Control` over `reward.weights`, with the values it applied and the lines it logged."""

    def __init__(self, folder: Path, parts: tuple[str, ...] = ("gsm8k", "model")) -> None:
        self.file, self.parts = folder / "control.yaml", parts
        self.applied: list[tuple[str, Any]] = []
        self.logged: list[str] = []
        self.control = Control(folder, [self, NoControls()], self.logged.append)
        self.step = 0

    def controls(self) -> Mapping[str, Callable[[Any], Any]]:
        return {"reward.weights": lambda argument: check_weights(argument, self.parts)}

    def set_control(self, key: str, value: Any) -> None:
        self.applied.append((key, value))

    def steps(self, count: int = 1) -> tuple[list[Any], list[str]]:
        """Run `count` steps; return the values applied and the lines logged."""
        self.applied.clear()
        self.logged.clear()
        for _ in range(count):
            self.step += 1
            self.control.apply(self.step, self.control.read())
        return self.applied, self.logged


class NoControls:
    def controls(self) -> dict[str, Any]:
        return {}

    def set_control(self, key: str, value: Any) -> None:
        raise AssertionError


def test_change_applies_from_the_next_step_and_is_logged_once(tmp_path: Path) -> None:
    harness = ControlHarness(tmp_path)
    assert harness.steps(2) == ([], [])
    harness.file.write_text("reward: {weights: {gsm8k: 0.4}}\n")
    assert harness.steps(3) == (
        [("reward.weights", {"gsm8k": 0.4})],
        ["control.yaml, from step 3 on: reward.weights={'gsm8k': 0.4}"],
    )
    harness.file.write_text("# again\nreward:\n  weights: {gsm8k: 0.4}\n")
    assert harness.steps() == ([], [])
    harness.file.write_text("")
    assert harness.steps() == ([], [])
    harness.file.unlink()
    assert harness.steps() == ([], []), "the value set stays"
    harness.file.write_text("reward:\n  weights:\n    model: 2\n")
    assert harness.steps(2)[0] == [("reward.weights", {"model": 2.0})]


BAD_FILES = {
    "not YAML": (b"reward: {weights: [\n", "is not valid YAML"),
    "a tag": (b"reward: !!python/object:os.system {}\n", "is not allowed in a configuration"),
    "an unknown part": (b"reward: {weights: {gsm: 1}}\n", "no part of the reward is called 'gsm'; did you mean gsm8k"),
    "NaN": (b"reward: {weights: {gsm8k: .nan}}\n", "reward.weights.gsm8k must be a number"),
    "infinite": (b"reward: {weights: {gsm8k: -.inf}}\n", "must be a number"),
    "text": (b"reward: {weights: {gsm8k: high}}\n", "not 'high'"),
    "weights not a mapping": (b"reward: {weights: 0.5}\n", "reward.weights must be a mapping"),
    "no weights": (b"reward: {weights:}\n", "must be a mapping"),
    "a list": (b"- reward\n", "holds a list, not a mapping of sections"),
    "a scalar section": (b"reward: 1\n", "reward must be a section of keys"),
    "another key": (b"reward: {timeout: 5}\n", "reward.timeout cannot change during a run (keys that can: reward"),
    "another section": (b"actor_optimizer: {lr: 1}\n", "actor_optimizer.lr cannot change during a run"),
    "one valid and one invalid key": (b"reward: {weights: {gsm8k: 1}, timeout: 5}\n", "reward.timeout cannot change"),
    "a key twice": (b"reward: {weights: {gsm8k: 1, gsm8k: 2}}\n", "gsm8k is set twice"),
    "not UTF-8": (b"reward: {weights: {gsm8k: \xff}}\n", "is not UTF-8 text"),
    "a truncated file": (b"reward:\n  weights:\n    gsm8k: 0.", "does not end with a line break"),
    "bytes": (bytes(range(256)), "is not UTF-8 text"),
    "zeros": (b"\0" * 100, "characters that are not text"),
    "too large": (b"#" * (2 << 20), "is larger than"),
    "aliases": (
        b"a: &a [1,1,1,1,1,1,1,1,1]\n" + b"".join(b"%c: &%c [" % (i, i) + b",".join([b"*%c" % (i - 1)] * 9) + b"]\n"
                                                   for i in range(98, 110)),
        "more than 100,000 values",
    ),
    "nested too deep": (b"[" * 1000 + b"]" * 1000 + b"\n", "nested more than"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_invalid_file_changes_nothing_and_warns_once(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    harness = ControlHarness(tmp_path)
    harness.file.write_text("reward: {weights: {gsm8k: 0.4}}\n")
    harness.steps()
    harness.file.write_bytes(content)
    applied, logged = harness.steps(3)
    assert applied == [] and len(logged) == 1 and "\n" not in logged[0], logged
    assert logged[0].startswith("warning: ") and message in logged[0], logged
    assert str(harness.file) in logged[0] and logged[0].endswith("; it changes nothing")
    harness.file.write_bytes(b"#\n" + content)
    assert len(harness.steps(2)[1]) == 1, "changed, and still invalid"
    harness.file.write_text("reward: {weights: {gsm8k: 0.5}}\n")
    assert harness.steps()[0] == [("reward.weights", {"gsm8k": 0.5})]


@pytest.mark.parametrize("kind", ["a directory", "a pipe", "a link to nowhere", "a secret"])
def test_unreadable_file_changes_nothing(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ControlHarness(tmp_path)
    if kind == "a directory":
        harness.file.mkdir()
    elif kind == "a pipe":
        os.mkfifo(harness.file)
    elif kind == "a link to nowhere":
        harness.file.symlink_to(tmp_path / "nowhere")
    else:
        harness.file.write_text("reward: {weights: {gsm8k: 1}}\n")

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
    applied, logged = harness.steps(3)
    messages = {
        "a directory": "is a folder",
        "a pipe": "is not a regular file",
        "a secret": "cannot be read: Permission denied",
    }
    assert applied == [] and [messages[kind] in item for item in logged] == [True] if kind in messages else not logged


def test_resume_restores_the_values_set(tmp_path: Path) -> None:
    harness = ControlHarness(tmp_path)
    harness.file.write_text("reward: {weights: {gsm8k: 0.4}}\n")
    harness.steps()
    state = json.loads(json.dumps(harness.control.state_dict()))
    harness.file.unlink()
    resumed = ControlHarness(tmp_path)
    resumed.control.load_state_dict(state)
    assert (
        resumed.applied == [("reward.weights", {"gsm8k": 0.4})] and "reward.weights={'gsm8k': 0.4}" in resumed.logged[0]
    )
    assert resumed.control.state_dict() == state and resumed.steps() == ([], [])
    other_harness = ControlHarness(tmp_path, parts=("model",))
    other_harness.control.load_state_dict(state | {"reward.colour": "red"})
    assert other_harness.applied == [] and other_harness.control.state_dict() == {}
    assert ["which is no longer possible" in line for line in other_harness.logged] == [True, True]


def test_checks_only_the_keys_in_the_file(tmp_path: Path) -> None:
    harness = ControlHarness(tmp_path, parts=())
    harness.file.write_text("reward: {weights: {}}\n")
    assert harness.steps()[0] == [("reward.weights", {})]
    with pytest.raises(ConfigError):
        harness.controls()["reward.weights"]({"a": 1})
