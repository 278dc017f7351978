"""Load reward functions, and parse the values that they return."""

import functools
from decimal import Decimal

import numpy
import pytest
import torch

from megarl.config import ConfigError
from megarl.config.plugins import is_async
from megarl.rewards.functions import check_function, load_functions
from megarl.rewards.gsm8k import gsm8k
from megarl.types.reward_values import Reward, RewardError, RewardFailure, parse_model_score, parse_reward, sum_reward

pytestmark = pytest.mark.alone


class Unprintable:
    def __str__(self):
        raise ValueError("not me")

    def __call__(self, rollout):
        return 0.5


@pytest.mark.parametrize("value", [True, 2, 0.5, numpy.float32(0.5), numpy.bool_(True), torch.tensor(0.25)])
def test_parses_numbers_as_rewards(value):
    result = parse_reward(value, 2)
    assert result == Reward(float(value)) and type(result.reward) is float


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
        (numpy.float64("nan"), "returned nan"),
        (torch.tensor(float("-inf")), "returned -inf"),
        (1e30, r"returned 1e\+30; beyond 1e\+06 all other advantages vanish"),
        (-1000001, r"returned -1000001; beyond 1e\+06|returned -1e\+06"),
        (10**400, "returned a number of many digits; beyond"),
        (numpy.array([1.0]), "returned a ndarray"),
        (Decimal("0.5"), "returned a Decimal"),
        (object, "returned a type"),
        (Unprintable(), "returned a Unprintable, which cannot be displayed"),
        (b"1", "returned a bytes"),
        ({}, "returned neither `reward` nor `turns`"),
        ({"parts": {"a": 1}}, "returned neither `reward` nor `turns`"),
        ({"reward": 1, "part": {}}, "returned 'part', which is not reward, parts or turns"),
        ({"reward": None}, "returned a NoneType"),
        ({"reward": 1, "parts": [1]}, "returned `parts` that are not a mapping"),
        ({"reward": 1, "parts": {"a": "b"}}, "part a, returned a str"),
        ({"reward": 1, "parts": {"a": float("nan")}}, "part a, returned nan"),
        ({"reward": 1, "parts": {1: 1.0}}, "returned `parts` that are not a mapping of names"),
        ({"turns": [1.0]}, "returned 1 `turns` for 2 turns of the policy's"),
        ({"turns": [1.0, float("inf")]}, "turn 1, returned inf"),
        ({"turns": "12"}, "returned `turns` that are a str, not a list"),
        (Reward(1e6, {}, [1.0, 1.0]), "with its turns, returned 1e[+]06; beyond"),
        (Reward("1"), "returned a str"),
    ],
)
def test_refuses_values_that_are_no_reward(value, message):
    with pytest.raises(RewardError, match=f"^it,? ?{message}"):
        parse_reward(value, 2)


def test_parses_parts_and_turn_rewards():
    returned = {"reward": numpy.float64(0.5), "parts": {"style": True}, "turns": numpy.array([0.25, 0])}
    result = parse_reward(returned, 2)
    assert result == Reward(0.5, {"style": 1.0}, (0.25, 0.0)) and sum_reward(result) == 0.75
    assert parse_reward({"turns": (1, 2)}, 2) == Reward(0.0, {}, (1.0, 2.0))
    assert parse_reward({"reward": 1, "parts": None, "turns": None}, 2) == parse_reward(Reward(1), 2) == Reward(1.0)


def test_unawaited_coroutines_are_an_error():
    async def async_reward():
        return 1.0

    coroutine = async_reward()
    with pytest.raises(RewardError, match="returned a coroutine, which is not awaited: make it a function by `async"):
        parse_reward(coroutine, 0)
    coroutine.close()


def test_model_scores_must_be_finite_and_bounded():
    assert parse_model_score(-2.5) == Reward(-2.5)
    for invalid in (float("nan"), float("inf"), 2e6):
        result = parse_model_score(invalid)
        assert isinstance(result, RewardFailure) and "reward.model" in result.reason


def test_loads_functions_by_module_and_name(tmp_path, monkeypatch):
    (tmp_path / "some_rewards.py").write_text("def gsm8k(rollout): return 0.5\nNUMBER = 3\n")
    (tmp_path / "my_broken_rewards.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_functions(["megarl.rewards.gsm8k:gsm8k"]) == {"gsm8k": gsm8k}
    loaded = load_functions(["megarl.rewards.gsm8k:gsm8k", "some_rewards:gsm8k"])
    assert list(loaded) == ["gsm8k", "some_rewards:gsm8k"]
    assert load_functions([]) == {}
    for name, message in {
        "some_rewards": "'some_rewards' is not of the form module:name",
        "some_rewards:": "not of the form",
        "my_reward:gsm8k": "cannot import my_reward of 'my_reward:gsm8k': ModuleNotFoundError",
        "my_broken_rewards:f": "ModuleNotFoundError: No module named 'nothing_of_that_name'",
        "some_rewards:gsm8": "some_rewards has no 'gsm8'; it has gsm8k",
        "some_rewards:NUMBER": "some_rewards:NUMBER is a int, not a function",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_functions([name])
    for duplicate in (
        ["some_rewards:gsm8k"] * 2,
        ["some_rewards:gsm8k", "megarl.rewards.gsm8k:gsm8k", "some_rewards:gsm8k"],
    ):
        with pytest.raises(ConfigError, match="some_rewards:gsm8k is listed twice"):
            load_functions(duplicate)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(3)", "cannot import {} of '{}:f': SystemExit: 3"),
        ("def f(", "cannot import {} .*SyntaxError"),
        ("raise KeyError('x')", "KeyError"),
        ("class E(BaseException): pass\nraise E", ": E$"),
        ("def f(): return 1", "must take a Rollout and nothing else: too many positional"),
        ("def f(rollout, answer): return 1", "nothing else: missing a required argument: 'answer'"),
        ("def f(rollout, *, scale): return 1", "nothing else: missing a required argument: 'scale'"),
        ("def f(rollout): yield 1", "is a generator"),
        ("async def f(rollout): yield 1", "is a generator"),
        ("class f:\n    def __init__(self, rollout): pass", "is a class"),
        ("class C:\n    def __call__(self, rollout): yield 1\nf = C()", "is a generator"),
        ("import functools\ndef g(a, b): yield\nf = functools.partial(g, 1)", "is a generator"),
        ("f = lambda: 1", "must take a Rollout"),
        ("f = 'text'", "is a str, not a function"),
    ],
)
def test_refuses_unusable_functions_at_startup(tmp_path, monkeypatch, text, message):
    name = f"bad_rewards_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message.format(name, name)) as error:
        load_functions([f"{name}:f"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "function", [functools.partial(lambda scale, rollout: scale, 0.5), Unprintable(), lambda rollout, scale=1: 0.5, max]
)
def test_accepts_any_callable_of_a_rollout(function):
    assert check_function(function, "it") is function


def test_detects_coroutine_functions():
    async def async_reward(rollout, scale=1.0):
        return scale

    class AsyncReward:
        async def __call__(self, rollout):
            return 1.0

    for function in (async_reward, functools.partial(async_reward, scale=2.0), AsyncReward()):
        assert check_function(function, "it") is function and is_async(function)
    assert not is_async(gsm8k) and not is_async(Unprintable())
