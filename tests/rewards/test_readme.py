"""The examples of megarl/rewards/README.md run, give the documented values, and are short."""

from __future__ import annotations

import json
import re
import sys
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import Config, from_dict
from megarl.observe.control import Control
from megarl.rewards.composite import combine_reward
from megarl.rewards.functions import load_functions
from megarl.rewards.reward_pool import RewardPool
from megarl.rewards.reward_settings import check_reward, check_weights
from megarl.types import Prompt, Rollout, Turn
from megarl.types.requirements import Requirements
from megarl.types.reward_values import Reward

pytestmark = pytest.mark.alone

README = Path(__file__).parents[2] / "megarl/rewards/README.md"
EXAMPLES = re.findall(r"^```(\w+) ([\w.]+)\n(.*?)^```$", README.read_text(), re.M | re.S)
ROLLOUT = Rollout(
    Prompt("p", ({"role": "user", "content": "2+2?"},), ground_truth="4"),
    (Turn((1,)), Turn((2,), (0.0,), True), Turn((3,)), Turn((4,), (0.0,), True)),
    messages=(
        {"role": "assistant", "content": "Tell me, please."},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4"},
    ),
)


def read_example(name: str, number: int = 0) -> str:
    return [text for _, result, text in EXAMPLES if result == name][number]


def read_config(number: int) -> Config:
    return from_dict(yaml.safe_load(read_example("config", number)))


def test_examples_exist_and_are_short() -> None:
    names = ["my_rewards.py", *3 * ["config"], "server.py", *3 * ["config"], "control"]
    assert [name for _, name, _ in EXAMPLES] == names
    assert all(len(text.splitlines()) < 15 for _, _, text in EXAMPLES)


def test_function_example_scores_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(read_example("my_rewards.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # a module that another test wrote
    reward = read_config(0).reward
    pool = RewardPool(load_functions(reward.functions), reward.functions, reward.timeout, 2, tmp_path / "rewards.log")
    try:
        results = pool.submit(ROLLOUT).result(60)
    finally:
        pool.close()
    assert results == {"brief": Reward(1.0), "polite": Reward(0.0, {"words": 3.0}, (1.0, 0.0))}
    scored = combine_reward(ROLLOUT, results, {})
    assert scored.reward == 2.0 and [turn.reward for turn in scored.turns] == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_config_examples_are_valid(number: int) -> None:
    result = read_config(number)
    options = dict(result.roles.get("reward", {}).get("options", {}))
    check_reward(result, Requirements("grpo", "prompts", ("rollout", "actor", "reward"), ("actor",)), options)


def test_service_example_answers_requests() -> None:
    namespace: dict[str, Any] = {}
    exec(read_example("server.py"), namespace)
    namespace["Judge"].log_message = lambda *_: None
    with HTTPServer(("127.0.0.1", 0), namespace["Judge"]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        body = {"conversations": [{"answer": "4", "ground_truth": "4"}, {"answer": "5", "ground_truth": "4"}]}
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", json.dumps(body).encode()) as answer:
            assert json.load(answer) == [{"reward": 1.0}, {"reward": 0.0}]
        server.shutdown()


PART_NAMES = ("gsm8k", "model", "service")


class WeightedReward:
    """A reward with the parts of the example, whose weights the control file can change."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = weights

    def check_config(self, config: Config) -> None:
        check_weights(config.reward.weights, PART_NAMES)

    def set_config(self, config: Config) -> None:
        self.weights = check_weights(config.reward.weights, PART_NAMES)


def test_control_file_example_changes_weights(tmp_path: Path) -> None:
    reward = WeightedReward(check_weights(read_config(3).reward.weights, PART_NAMES))
    results = {"gsm8k": Reward(1.0), "model": Reward(-0.5), "service": Reward(2.0)}
    assert combine_reward(ROLLOUT, results, reward.weights).reward == pytest.approx(0.4 - 0.25 + 0.2)
    control = Control(tmp_path, read_config(3), [reward], lambda line: None)
    (tmp_path / "control.yaml").write_text(read_example("control"))
    control.apply(2, control.read())
    assert combine_reward(ROLLOUT, results, reward.weights).reward == pytest.approx(0.8 - 0.05 + 0.2)
    assert replace(combine_reward(ROLLOUT, results, reward.weights), reward=0.0, reward_parts={}) == ROLLOUT
