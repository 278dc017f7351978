"""What a user writes into the control file holds from the next step on, or is said to be wrong, once."""

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


class Lab:
    """What may change, and what has."""

    def __init__(self, folder: Path, parts: tuple[str, ...] = ("gsm8k", "model")) -> None:
        self.file, self.parts = folder / "control.yaml", parts
        self.had: list[tuple[str, Any]] = []
        self.said: list[str] = []
        self.control_of_it = Control(folder, [self, Nothing()], self.said.append)
        self.step = 0

    def controls(self) -> Mapping[str, Callable[[Any], Any]]:
        return {"reward.weights": lambda argument: check_weights(argument, self.parts)}

    def set_control(self, key: str, value: Any) -> None:
        self.had.append((key, value))

    def steps(self, count: int = 1) -> tuple[list[Any], list[str]]:
        """What is set and said in so many steps."""
        self.had.clear()
        self.said.clear()
        for _ in range(count):
            self.step += 1
            self.control_of_it.apply(self.step, self.control_of_it.read())
        return self.had, self.said


class Nothing:
    def controls(self) -> dict[str, Any]:
        return {}

    def set_control(self, key: str, value: Any) -> None:
        raise AssertionError


def test_a_change_holds_from_the_next_step_on_and_is_said_once(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    assert lab.steps(2) == ([], [])
    lab.file.write_text("reward: {weights: {gsm8k: 0.4}}\n")
    assert lab.steps(3) == (
        [("reward.weights", {"gsm8k": 0.4})],
        ["control.yaml, from step 3 on: reward.weights={'gsm8k': 0.4}"],
    )
    lab.file.write_text("# again\nreward:\n  weights: {gsm8k: 0.4}\n")
    assert lab.steps() == ([], [])
    lab.file.write_text("")
    assert lab.steps() == ([], [])
    lab.file.unlink()
    assert lab.steps() == ([], []), "what was set stays"
    lab.file.write_text("reward:\n  weights:\n    model: 2\n")
    assert lab.steps(2)[0] == [("reward.weights", {"model": 2.0})]


BAD = {
    "not YAML": (b"reward: {weights: [\n", "is not valid YAML"),
    "a tag": (b"reward: !!python/object:os.system {}\n", "is not allowed in a configuration"),
    "an unknown part": (b"reward: {weights: {gsm: 1}}\n", "no part of the reward is called 'gsm'; did you mean gsm8k"),
    "NaN": (b"reward: {weights: {gsm8k: .nan}}\n", "reward.weights.gsm8k must be a number"),
    "infinite": (b"reward: {weights: {gsm8k: -.inf}}\n", "must be a number"),
    "text": (b"reward: {weights: {gsm8k: high}}\n", "not 'high'"),
    "no mapping of weights": (b"reward: {weights: 0.5}\n", "reward.weights must be a mapping"),
    "no weights": (b"reward: {weights:}\n", "must be a mapping"),
    "a list": (b"- reward\n", "holds a list, not a mapping of sections"),
    "a section that is none": (b"reward: 1\n", "reward must be a section of keys"),
    "another key": (b"reward: {timeout: 5}\n", "reward.timeout cannot change during a run (keys that can: reward"),
    "another section": (b"actor_optimizer: {lr: 1}\n", "actor_optimizer.lr cannot change during a run"),
    "a part of it good": (b"reward: {weights: {gsm8k: 1}, timeout: 5}\n", "reward.timeout cannot change"),
    "a key twice": (b"reward: {weights: {gsm8k: 1, gsm8k: 2}}\n", "gsm8k is set twice"),
    "not UTF-8": (b"reward: {weights: {gsm8k: \xff}}\n", "is not UTF-8 text"),
    "half of it": (b"reward:\n  weights:\n    gsm8k: 0.", "does not end with a line break"),
    "bytes": (bytes(range(256)), "is not UTF-8 text"),
    "zeros": (b"\0" * 100, "characters that are not text"),
    "much": (b"#" * (2 << 20), "is larger than"),
    "aliases": (
        b"a: &a [1,1,1,1,1,1,1,1,1]\n" + b"".join(b"%c: &%c [" % (i, i) + b",".join([b"*%c" % (i - 1)] * 9) + b"]\n"
                                                   for i in range(98, 110)),
        "more than 100,000 values",
    ),
    "deep": (b"[" * 1000 + b"]" * 1000 + b"\n", "nested more than"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_changes_nothing_and_says_so_once(tmp_path: Path, name: str) -> None:
    content, complaint = BAD[name]
    lab = Lab(tmp_path)
    lab.file.write_text("reward: {weights: {gsm8k: 0.4}}\n")
    lab.steps()
    lab.file.write_bytes(content)
    had, said = lab.steps(3)
    assert had == [] and len(said) == 1 and "\n" not in said[0], said
    assert said[0].startswith("warning: ") and complaint in said[0], said
    assert str(lab.file) in said[0] and said[0].endswith("; it changes nothing")
    lab.file.write_bytes(b"#\n" + content)
    assert len(lab.steps(2)[1]) == 1, "it has been changed, and is not better"
    lab.file.write_text("reward: {weights: {gsm8k: 0.5}}\n")
    assert lab.steps()[0] == [("reward.weights", {"gsm8k": 0.5})]


@pytest.mark.parametrize("what", ["a directory", "a pipe", "a link to nowhere", "a secret"])
def test_what_is_no_file_changes_nothing(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path)
    if what == "a directory":
        lab.file.mkdir()
    elif what == "a pipe":
        os.mkfifo(lab.file)
    elif what == "a link to nowhere":
        lab.file.symlink_to(tmp_path / "nowhere")
    else:
        lab.file.write_text("reward: {weights: {gsm8k: 1}}\n")

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
    had, said = lab.steps(3)
    complaints = {
        "a directory": "is a folder",
        "a pipe": "is not a regular file",
        "a secret": "cannot be read: Permission denied",
    }
    assert had == [] and [complaints[what] in item for item in said] == [True] if what in complaints else not said


def test_a_resume_goes_on_with_what_was_set(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.file.write_text("reward: {weights: {gsm8k: 0.4}}\n")
    lab.steps()
    state = json.loads(json.dumps(lab.control_of_it.state_dict()))
    lab.file.unlink()
    again = Lab(tmp_path)
    again.control_of_it.load_state_dict(state)
    assert again.had == [("reward.weights", {"gsm8k": 0.4})] and "reward.weights={'gsm8k': 0.4}" in again.said[0]
    assert again.control_of_it.state_dict() == state and again.steps() == ([], [])
    other = Lab(tmp_path, parts=("model",))
    other.control_of_it.load_state_dict(state | {"reward.colour": "red"})
    assert other.had == [] and other.control_of_it.state_dict() == {}
    assert ["which is no longer possible" in line for line in other.said] == [True, True]


def test_checks_are_only_asked_for_what_the_file_says(tmp_path: Path) -> None:
    lab = Lab(tmp_path, parts=())
    lab.file.write_text("reward: {weights: {}}\n")
    assert lab.steps()[0] == [("reward.weights", {})]
    with pytest.raises(ConfigError):
        lab.controls()["reward.weights"]({"a": 1})
