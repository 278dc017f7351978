"""Reward functions called in this process: failures, timeouts and isolation from the run."""

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.rewards import reward_process
from megarl.rewards.composite import NOT_SCORED
from megarl.rewards.reward_process import score
from megarl.types import Prompt, Rollout, Turn
from megarl.types.reward_values import Reward, RewardFailure

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
ROLLOUTS = [
    Rollout(Prompt(id=f"sample-{i}", messages=()), (Turn((1,)),), messages=({"role": "assistant", "content": "a" * i},))
    for i in range(3)
]


def score_failing(function, timeout=float("inf"), rollouts=ROLLOUTS[:1]):
    """Return the reason of each failure."""
    result = [rewards["f"] for rewards in score(rollouts, {"f": function}, timeout)]
    assert all(isinstance(item, RewardFailure) and "\n" not in item.reason for item in result)
    return [item.reason for item in result]


def length(rollout):
    return len(rollout.answer)


def empty(rollout):
    return rollout.answer == ""


async def async_length(rollout):
    await asyncio.sleep(0)
    return {"reward": len(rollout.answer), "parts": {"a": 1}}


def test_scores_each_rollout_with_each_function():
    result = score(ROLLOUTS, {"length": length, "empty": empty, "async_length": async_length})
    assert [list(item) for item in result] == [["length", "empty", "async_length"]] * 3
    assert [item["length"] for item in result] == [Reward(0.0), Reward(1.0), Reward(2.0)]
    assert [item["empty"] for item in result] == [Reward(1.0), Reward(0.0), Reward(0.0)]
    assert [item["async_length"] for item in result] == [Reward(float(i), {"a": 1.0}) for i in range(3)]
    assert score([], {"length": length, "async_length": async_length}) == []


def test_a_failed_call_leaves_other_rollouts_scored():
    result = score(ROLLOUTS, {"inverse": lambda rollout: 1 / len(rollout.answer)})
    assert [item["inverse"] for item in result][1:] == [Reward(1.0), Reward(0.5)]
    assert isinstance(result[0]["inverse"], RewardFailure)


def test_an_exception_becomes_a_one_line_reason():
    def broken(rollout):
        raise KeyError("no such\nkey")

    (reason,) = score_failing(broken)
    assert reason.startswith("it raised KeyError: ") and "test_reward_process.py:" in reason


def test_awaits_coroutine_functions_concurrently():
    arrived = []

    async def waits_for_all(rollout):
        arrived.append(asyncio.Event())
        if len(arrived) == 3:
            for event in arrived:
                event.set()
        await arrived[len(arrived) - 1].wait()
        return 1.0

    assert [item["f"] for item in score(ROLLOUTS, {"f": waits_for_all})] == [Reward(1.0)] * 3


async def hangs_async(rollout):
    await asyncio.sleep(60)


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit(), RecursionError("deep")])
def test_exit_exceptions_fail_only_the_call(error):
    def leaves(rollout):
        raise error

    async def leaves_later(rollout):
        raise error

    for function in (leaves, leaves_later):
        (reason,) = score_failing(function)
        assert reason.startswith(f"it raised {type(error).__name__}")


def test_ctrl_c_and_signal_handlers_end_the_run():
    def interrupted(rollout):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(ROLLOUTS, {"mine": interrupted})
    handler = {}  # like the handler of flow.py, when the signal arrives during a function
    exec(compile("def ask():\n    raise SystemExit(143)", str(ROOT / "megarl/flow.py"), "exec"), handler)
    with pytest.raises(SystemExit) as exit_info:
        score(ROLLOUTS, {"mine": lambda rollout: handler["ask"]()})
    assert exit_info.value.code == 143


def test_functions_cannot_modify_the_rollout():
    extra, message = {"tests": [[1], [2]]}, {"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}
    prompt = Prompt("p", ({"role": "user", "content": "q"},), ground_truth=["1"], extra=extra)
    rollout = Rollout(prompt, (Turn((1,)),), messages=(message,), routing=torch.ones(1, 1, 1, dtype=torch.int16))

    def greedy(copy):
        assert copy.routing is None
        copy.messages[0]["tool_calls"][0]["id"] = "changed"
        copy.messages[0]["content"] = "changed"
        copy.prompt.messages[0]["content"] = "changed"
        copy.prompt.extra["tests"][0].append(9)
        copy.prompt.ground_truth.append("2")
        copy.reward_parts["honest"] = 9.0
        object.__setattr__(copy, "reward", 9.0)
        object.__setattr__(copy.prompt, "id", "changed")
        return 1.0

    def honest(copy):
        assert copy.prompt == prompt and copy.messages == (message,) and copy.reward == 0.0
        return 1.0

    before = replace(rollout)
    (result,) = score([rollout], {"greedy": greedy, "honest": honest})
    assert result == {"greedy": Reward(1.0), "honest": Reward(1.0)} and rollout == before
    assert extra == {"tests": [[1], [2]]} and message["tool_calls"] == [{"id": "x"}] and message["content"] == "a"


def sleeps(rollout):
    time.sleep(60)


def spins(rollout):
    while True:
        pass


def swallows_exception(rollout):
    try:
        time.sleep(60)
    except BaseException:  # noqa: B036
        return 1.0


def replaces_exception(rollout):
    try:
        time.sleep(60)
    except BaseException as error:  # noqa: B036
        raise ValueError("something else") from error


@pytest.mark.parametrize("function", [sleeps, spins, swallows_exception, replaces_exception, hangs_async])
def test_interrupts_hanging_functions_at_the_timeout(function):
    before = signal.getsignal(reward_process.TIMEOUT_SIGNAL)
    (reason,) = score_failing(function, timeout=0.2)
    assert reason == "it took longer than reward.timeout=0.2 s; make it faster or raise reward.timeout"
    assert signal.getsignal(reward_process.TIMEOUT_SIGNAL) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "reward deadline"]


def test_functions_may_use_sigalrm():
    def use_alarm(rollout):
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

    assert score(ROLLOUTS, {"use_alarm": use_alarm}, timeout=30.0)[0]["use_alarm"] == Reward(0.25)


def test_timeout_applies_to_each_call():
    def slow(rollout):
        time.sleep(0.15)
        return 1.0

    assert score(ROLLOUTS, {"a": slow, "b": slow}, timeout=0.6) == [{"a": Reward(1.0), "b": Reward(1.0)}] * 3


def stubborn(rollout):
    while True:
        try:
            time.sleep(60)
        except BaseException:  # noqa: B036
            pass


def test_an_uninterruptible_function_ends_the_process(monkeypatch):
    monkeypatch.setattr(reward_process, "GRACE_S", 0.3)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        try:
            score(ROLLOUTS, {"stubborn": stubborn}, timeout=0.2)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stderr:
        line = stderr.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    message = "reward function stubborn on the sample 'sample-0' took longer than reward.timeout=0.2 s"
    assert line == f"error: {message} and does not stop\n"


def test_stops_calling_functions_after_too_many_failures():
    calls = []

    def fails(rollout):
        calls.append(rollout.prompt.id)
        raise ValueError("no")

    async def hangs(rollout):
        calls.append(rollout.prompt.id)
        await asyncio.sleep(0.05 if len(calls) < 4 else 600.0)
        raise ValueError("no")

    for function in (fails, hangs):
        calls.clear()
        started = time.monotonic()
        result = score(ROLLOUTS * 20, {"good": length, "f": function}, 700.0, max_failed=2)
        assert time.monotonic() - started < 30.0
        assert [rewards["good"] for rewards in result] == [Reward(float(i)) for i in range(3)] * 20
        results = [rewards["f"] for rewards in result]
        assert sum(item is NOT_SCORED for item in results) == 57 and all(
            isinstance(item, RewardFailure) for item in results
        )
        assert len(calls) == (3 if function is fails else 60)
