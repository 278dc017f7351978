import asyncio
import functools
import os
import signal
import threading
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy
import pytest
import torch

from megarl.config import ConfigError
from megarl.rewards import deadline
from megarl.rewards.functions import RewardError, checked, load_functions, score
from megarl.rewards.gsm8k import gsm8k
from megarl.types import Prompt, Rollout, Turn

ROOT = Path(__file__).parents[2]
ROLLOUTS = [
    Rollout(Prompt(id=f"sample-{i}", messages=()), (Turn((1,)),), messages=({"role": "assistant", "content": "a" * i},))
    for i in range(3)
]


class Unshown:
    def __str__(self):
        raise ValueError("not me")

    def __call__(self, rollout):
        return 0.5


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
        (numpy.float64("nan"), "returned nan"),
        (torch.tensor(float("-inf")), "returned -inf"),
        (1e30, r"returned 1e\+30; beyond 1e\+06 the advantages of all others drown"),
        (-1000001, r"returned -1000001; beyond 1e\+06|returned -1e\+06"),
        (10**400, "returned a number of many digits; beyond"),
        (numpy.array([1.0]), "returned a ndarray"),
        (Decimal("0.5"), "returned a Decimal"),
        (object, "returned a type"),
        (Unshown(), "returned a Unshown, which cannot be shown"),
        (b"1", "returned a bytes"),
        ({}, "returned a dict"),
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
    for twice in (["my_rewards:gsm8k"] * 2, ["my_rewards:gsm8k", "megarl.rewards.gsm8k:gsm8k", "my_rewards:gsm8k"]):
        with pytest.raises(ConfigError, match="my_rewards:gsm8k is listed twice"):
            load_functions(twice)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(3)", "cannot import {} of '{}:f': SystemExit: 3"),
        ("def f(", "cannot import {} .*SyntaxError"),
        ("raise KeyError('x')", "KeyError"),
        ("class E(BaseException): pass\nraise E", "E: "),
        ("def f(): return 1", "must take a Rollout and nothing else: too many positional"),
        ("def f(rollout, answer): return 1", "nothing else: missing a required argument: 'answer'"),
        ("def f(rollout, *, scale): return 1", "nothing else: missing a required argument: 'scale'"),
        ("async def f(rollout): return 1", "is a coroutine or a generator"),
        ("def f(rollout): yield 1", "is a coroutine or a generator"),
        ("class f:\n    def __init__(self, rollout): pass", "is a class"),
        ("class C:\n    async def __call__(self, rollout): return 1\nf = C()", "is a coroutine or a generator"),
        ("import functools\nasync def g(a, b): ...\nf = functools.partial(g, 1)", "is a coroutine or a generator"),
        ("f = lambda: 1", "must take a Rollout"),
        ("f = 'text'", "is a str, not a function"),
    ],
)
def test_what_cannot_be_a_reward_is_named_before_anything_starts(tmp_path, monkeypatch, text, message):
    name = f"bad_rewards_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message.format(name, name)) as error:
        load_functions([f"{name}:f"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "function", [functools.partial(lambda scale, rollout: scale, 0.5), Unshown(), lambda rollout, scale=1: 0.5, max]
)
def test_whatever_can_be_called_with_a_rollout_is_a_function(function):
    assert checked(function, "it") is function


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit(), RecursionError("deep")])
def test_a_function_cannot_end_the_run_without_a_word(error):
    def leaves(rollout):
        raise error

    with pytest.raises(RewardError, match=f"mine on the sample 'sample-0' raised {type(error).__name__}"):
        score(ROLLOUTS, {"mine": leaves})


def test_ctrl_c_and_a_handler_of_signals_are_not_the_functions():
    def interrupted(rollout):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(ROLLOUTS, {"mine": interrupted})
    handler = {}  # as flow.py's, where the signal comes while a function runs
    exec(compile("def ask():\n    raise SystemExit(143)", str(ROOT / "megarl/flow.py"), "exec"), handler)
    with pytest.raises(SystemExit) as leaving:
        score(ROLLOUTS, {"mine": lambda rollout: handler["ask"]()})
    assert leaving.value.code == 143


def test_an_aborted_rollout_is_shown_to_nobody():
    aborted = replace(ROLLOUTS[0], status="aborted", reward=3.0, reward_parts={"old": 3.0})
    scored = score([aborted, ROLLOUTS[2]], {"length": length, "picky": lambda rollout: 1 / len(rollout.answer)})
    assert (scored[0].reward, scored[0].reward_parts, scored[0].status) == (0.0, {}, "aborted")
    assert scored[1].reward == 2.5


def test_a_function_cannot_change_what_others_see():
    extra, message = {"tests": [[1], [2]]}, {"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}
    prompt = Prompt("p", ({"role": "user", "content": "q"},), ground_truth=["1"], extra=extra)
    rollout = Rollout(prompt, (Turn((1,)),), messages=(message,), routing=torch.ones(1, 1, 1, dtype=torch.int16))

    def greedy(shown):
        assert shown.routing is None
        shown.messages[0]["tool_calls"][0]["id"] = "changed"
        shown.messages[0]["content"] = "changed"
        shown.prompt.messages[0]["content"] = "changed"
        shown.prompt.extra["tests"][0].append(9)
        shown.prompt.ground_truth.append("2")
        shown.reward_parts["honest"] = 9.0
        object.__setattr__(shown, "reward", 9.0)
        object.__setattr__(shown.prompt, "id", "changed")
        return 1.0

    def honest(shown):
        assert shown.prompt == prompt and shown.messages == (message,) and shown.reward == 0.0
        return 1.0

    (scored,) = score([rollout], {"greedy": greedy, "honest": honest})
    assert replace(scored, reward=0.0, reward_parts={}) == rollout and scored.reward == 2.0
    assert scored.routing is rollout.routing
    assert extra == {"tests": [[1], [2]]} and message["tool_calls"] == [{"id": "x"}] and message["content"] == "a"


def sleeps(rollout):
    time.sleep(60)


def spins(rollout):
    while True:
        pass


def swallows(rollout):
    try:
        time.sleep(60)
    except BaseException:  # noqa: B036
        return 1.0


def renames(rollout):
    try:
        time.sleep(60)
    except BaseException as error:  # noqa: B036
        raise ValueError("something else") from error


@pytest.mark.parametrize("function", [sleeps, spins, swallows, renames])
def test_a_function_that_hangs_is_interrupted_and_named(function):
    before = signal.getsignal(deadline.LATE)
    with pytest.raises(RewardError, match=r"function f on the sample 'sample-0' took longer than reward.timeout=0.2 s"):
        score(ROLLOUTS, {"f": function}, timeout=0.2)
    assert signal.getsignal(deadline.LATE) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "reward deadline"]


def test_functions_may_use_an_alarm_of_their_own():
    def own(rollout):
        def handler(number, frame):
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        try:
            time.sleep(60)
        except TimeoutError:
            return 0.25
        finally:
            signal.signal(signal.SIGALRM, before)

    assert score(ROLLOUTS, {"own": own}, timeout=30.0)[0].reward == 0.25


def test_the_limit_is_that_of_a_call_not_of_all():
    def slow(rollout):
        time.sleep(0.15)
        return 1.0

    assert [rollout.reward for rollout in score(ROLLOUTS, {"a": slow, "b": slow}, timeout=0.6)] == [2.0] * 3


def stubborn(rollout):
    while True:
        try:
            time.sleep(60)
        except BaseException:  # noqa: B036
            pass


def test_a_function_that_cannot_be_interrupted_ends_the_process_with_a_line(monkeypatch):
    monkeypatch.setattr(deadline, "GRACE_S", 0.3)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        try:
            score(ROLLOUTS, {"stubborn": stubborn}, timeout=0.2)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        line = said.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    about = "reward function stubborn on the sample 'sample-0' took longer than reward.timeout=0.2 s"
    assert line == f"error: {about}, and does not stop\n"
