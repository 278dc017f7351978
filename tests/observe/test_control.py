"""The control file: changes apply from the next step; an invalid file is reported once and changes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, from_dict
from megarl.observe.control import Control
from megarl.rewards.reward_settings import check_weights

pytestmark = pytest.mark.alone


class ControlHarness:
    """A `Control` over `reward.weights`, with the weights it applied and the lines it logged."""

    def __init__(self, folder: Path, parts: tuple[str, ...] = ("gsm8k", "model"), config: Config | None = None) -> None:
        self.file, self.parts = folder / "control.yaml", parts
        self.applied: list[tuple[str, Any]] = []
        self.logged: list[str] = []
        self.config = config or Config()
        self.control = Control(folder, self.config, [self], self.logged.append)
        self.step = 0

    def check_config(self, config: Config) -> None:
        check_weights(config.reward.weights, self.parts)

    def set_config(self, config: Config) -> None:
        if config.reward.weights != self.config.reward.weights:
            self.applied.append(("reward.weights", config.reward.weights))
        self.config = config

    def steps(self, count: int = 1) -> tuple[list[Any], list[str]]:
        """Run `count` steps; return the values applied and the lines logged."""
        self.applied.clear()
        self.logged.clear()
        for _ in range(count):
            self.step += 1
            self.control.apply(self.step, self.control.read())
        return self.applied, self.logged


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
    assert harness.steps(2)[0] == [("reward.weights", {"model": 2})]


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
    "another key": (b"reward: {timeout: 5}\n", "reward.timeout cannot change during a run (keys that can: rollout"),
    "another section": (b"actor_optimizer: {beta1: 0.5}\n", "actor_optimizer.beta1 cannot change during a run"),
    "an unknown key": (b"rollout: {temprature: 1}\n", "did you mean rollout.temperature?"),
    "a value out of range": (b"rollout: {top_p: 2}\n", "rollout.top_p must be a number, above 0 and at most 1"),
    "a longer context than planned": (b"rollout: {max_context: 9999}\n", "rollout.max_context=9999 is above 4096"),
    "a shorter context than loaded prompts": (b"rollout: {max_context: 99}\n", "rollout.max_context=99 is below 4096"),
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
    resumed.control.start(1)
    assert (
        resumed.applied == [("reward.weights", {"gsm8k": 0.4})] and "reward.weights={'gsm8k': 0.4}" in resumed.logged[0]
    )
    assert resumed.control.state_dict() == state and resumed.steps() == ([], [])
    other_harness = ControlHarness(tmp_path, parts=("model",))
    other_harness.control.load_state_dict(state | {"reward.colour": "red"})
    other_harness.control.start(1)
    assert other_harness.applied == [] and other_harness.control.state_dict() == {}
    assert ["which is no longer possible" in line for line in other_harness.logged] == [True, True]


def test_stages_and_file_set_the_configuration_of_each_step(tmp_path: Path) -> None:
    """The file takes precedence over all stages, and a resumed run has the same configuration in each step."""
    config = from_dict(
        {
            "stages": {
                "3": {"rollout": {"max_context": 8192, "temperature": 0.7}},
                "5": {"actor_optimizer": {"lr": 1e-7}},
            }
        }
    )

    def values(harness: ControlHarness) -> tuple[float, ...]:
        rollout = harness.config.rollout
        return rollout.max_context, rollout.temperature, harness.config.actor_optimizer.lr

    harness = ControlHarness(tmp_path, config=config)
    harness.control.start(1)
    assert harness.steps(2)[1] == [] and values(harness) == (4096, 1.0, 1e-6)
    assert harness.steps()[1] == [
        "stage, from step 3 on: rollout.max_context 4096 -> 8192, rollout.temperature 1.0 -> 0.7"
    ]
    harness.file.write_text("rollout: {temperature: 0.9}\n")
    assert harness.steps()[1] == ["control.yaml, from step 4 on: rollout.temperature=0.9"]
    state = json.loads(json.dumps(harness.control.state_dict()))
    assert values(harness) == (8192, 0.9, 1e-6)
    harness.steps()
    assert values(harness) == (8192, 0.9, 1e-7)
    resumed = ControlHarness(tmp_path, config=config)
    resumed.control.load_state_dict(state)
    resumed.control.start(4)
    assert values(resumed) == (8192, 0.9, 1e-6)
    resumed.step = 4
    resumed.steps()
    assert values(resumed) == (8192, 0.9, 1e-7)


def test_file_may_not_change_the_distribution_of_running_conversations(tmp_path: Path) -> None:
    harness = ControlHarness(tmp_path, config=from_dict({"rollout": {"oversample": 2}}))
    harness.file.write_text("rollout: {temperature: 0.9}\n")
    (line,) = harness.steps()[1]
    assert "rollout.temperature cannot change with rollout.oversample=2" in line
    harness.file.write_text("rollout: {max_new_tokens: 9}\n")
    harness.steps()
    assert harness.config.rollout.max_new_tokens == 9
