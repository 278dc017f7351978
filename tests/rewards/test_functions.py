import numpy
import pytest
import torch

from megarl.config import ConfigError
from megarl.rewards.functions import RewardError, load_functions, score
from megarl.rewards.gsm8k import gsm8k
from megarl.types import Prompt, Rollout, Turn

ROLLOUTS = [
    Rollout(Prompt(id=f"sample-{i}", messages=()), (Turn((1,)),), messages=({"role": "assistant", "content": "a" * i},))
    for i in range(3)
]


def length(rollout):
    return len(rollout.answer)


def empty(rollout):
    return rollout.answer == ""


def test_reward_is_the_sum_of_its_parts():
    scored = score(ROLLOUTS, {"length": length, "empty": empty})
    assert [rollout.reward for rollout in scored] == [1.0, 1.0, 2.0]
    assert scored[0].reward_parts == {"length": 0.0, "empty": 1.0}
    assert all(type(value) is float for rollout in scored for value in rollout.reward_parts.values())
    assert [rollout.prompt.id for rollout in scored] == ["sample-0", "sample-1", "sample-2"]
    assert ROLLOUTS[2].reward == 0.0 and ROLLOUTS[2].reward_parts == {}
    assert score([], {"length": length}) == []


@pytest.mark.parametrize("value", [True, 2, 0.5, numpy.float32(0.5), numpy.bool_(True), torch.tensor(0.25)])
def test_numbers(value):
    assert score(ROLLOUTS[:1], {"f": lambda rollout: value})[0].reward == float(value)


@pytest.mark.parametrize(
    "value, message",
    [
        (None, "returned a NoneType, 'None'; it must return a number"),
        ("1.0", "returned a str, '1.0'"),
        ([1.0], "returned a list"),
        (torch.ones(2), "returned a Tensor"),
        (1j, "returned a complex"),
        (float("nan"), "returned nan; it must return a finite number"),
        (float("inf"), "returned inf"),
        (-1e39, "returned -1e\\+39; it must return a finite number, of fp32"),
        pytest.param(10**5000, "returned an integer of 16610 bits", id="huge"),
    ],
)
def test_anything_else_stops(value, message):
    with pytest.raises(RewardError, match=f"reward function mine on the sample 'sample-1' {message}"):
        score(ROLLOUTS, {"mine": lambda rollout: value if rollout.prompt.id == "sample-1" else 0})


def test_a_function_that_raises_stops_with_one_line():
    def broken(rollout):
        raise KeyError("no such\nkey")

    message = "function mine on the sample 'sample-0' raised KeyError: .*test_functions.py:"
    with pytest.raises(RewardError, match=message) as error:
        score(ROLLOUTS, {"mine": broken})
    assert "\n" not in str(error.value)


def test_load(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def gsm8k(rollout): return 0.5\nNUMBER = 3\n")
    (tmp_path / "my_broken_rewards.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_functions(["megarl.rewards.gsm8k:gsm8k"]) == {"gsm8k": gsm8k}
    both = load_functions(["megarl.rewards.gsm8k:gsm8k", "my_rewards:gsm8k"])
    assert list(both) == ["gsm8k", "my_rewards:gsm8k"]
    assert load_functions([]) == {}
    for name, message in {
        "my_rewards": "'my_rewards' is not of the form module:name",
        "my_rewards:": "not of the form",
        "my_reward:gsm8k": "cannot import my_reward of 'my_reward:gsm8k': ModuleNotFoundError",
        "my_broken_rewards:f": "ModuleNotFoundError: No module named 'nothing_of_that_name'",
        "my_rewards:gsm8": "my_rewards has no 'gsm8'; it has gsm8k",
        "my_rewards:NUMBER": "my_rewards:NUMBER is a int, not a function",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_functions([name])
    with pytest.raises(ConfigError, match="listed twice"):
        load_functions(["my_rewards:gsm8k", "my_rewards:gsm8k", "my_rewards:gsm8k"])
