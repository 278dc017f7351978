"""Reward functions in real worker processes: a bad call fails alone, and its processes are cleaned up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.processes.children import NO_LIMITS, ProcessLimits
from megarl.rewards.functions import load_functions
from megarl.rewards.reward_pool import RewardPool
from megarl.types import Prompt, Rollout, Turn
from megarl.types.reward_values import Reward, RewardFailure, RewardResult

pytestmark = [pytest.mark.alone, pytest.mark.slow]

HERE = Path(__file__).parent
MakePool = Callable[..., RewardPool]


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    monkeypatch.syspath_prepend(HERE)
    pools = []

    def start(*names: str, limit: float = 60.0, size: int = 1, limits: ProcessLimits = NO_LIMITS) -> RewardPool:
        specs = [f"misbehaving_rewards:{name}" for name in names]
        pools.append(RewardPool(load_functions(specs), specs, limit, size, tmp_path / "logs/rewards_0.log", limits))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def rollout(sample: str) -> Rollout:
    turns = (Turn((1, 2)), Turn((3,), (0.0,), True), Turn((4,)), Turn((5,), (0.0,), True))
    return Rollout(Prompt(sample, ()), turns, group=3, reward=2.0)


def score(pool: RewardPool, *samples: str, name: str = "misbehave") -> list[RewardResult]:
    futures = [pool.submit(rollout(sample)) for sample in samples]
    return [item.result(120)[name] for item in futures]


def test_failing_calls_fail_alone(make_pool: MakePool, tmp_path: Path) -> None:
    """One process at a time: after it dies, the next call starts another."""
    behaviors = ("fine", "nan", "large", "text", "raise", "exit", "die", "fault", "killed", "hang", "spin", "close")
    results = dict(zip(behaviors, score(make_pool("misbehave", limit=1.5), *behaviors), strict=True))
    assert results.pop("fine") == Reward(1.0)
    messages = {
        "nan": "returned nan; it must return a finite number",
        "large": "beyond 1e+06 all other advantages",
        "text": "returned a str, '1.0'; it must return a number",
        "raise": "it raised ZeroDivisionError: division by zero (",
        "exit": "it raised SystemExit: 3 (",
        "die": "its process ended with exit status 7",
        "fault": "its process was killed by SIGSEGV",
        "killed": "its process was killed by SIGKILL, perhaps out of memory",
        "hang": "it took longer than reward.timeout=1.5 s",
        "spin": "it took longer than reward.timeout=1.5 s",
        "close": "its process ended with exit status 1",
    }
    for behavior, message in messages.items():
        result = results[behavior]
        assert isinstance(result, RewardFailure) and message in result.reason and "\n" not in result.reason, (
            behavior,
            result,
        )
    assert (HERE / "misbehaving_rewards.py").name in results["raise"].reason  # type: ignore[union-attr]
    log = (tmp_path / "logs/rewards_0.log").read_text()
    assert "Bad file descriptor" in log
    for behavior in messages:  # logged with or without output of the function
        assert f"  misbehave of prompt '{behavior}': {results[behavior].reason}\n" in log  # type: ignore[union-attr]
    assert "'fine'" not in log


def test_functions_may_print_use_alarms_and_reward_turns(make_pool: MakePool, tmp_path: Path) -> None:
    """Functions get a copy of the rollout without routing."""
    results = score(make_pool("misbehave"), "print", "alarm", "turns", "whole", "too many", "routing")
    assert results[:4] == [Reward(0.5), Reward(0.75), Reward(0.0, {"style": 2.0}, (0.25, 0.5))] + [
        Reward(1.0, {"style": 2.0}, (0.5, 0.25))
    ]
    assert isinstance(results[4], RewardFailure) and "3 `turns` for 2 turns of the policy's" in results[4].reason
    assert results[5] == Reward(1.0)
    assert wait_until(lambda: "said by a function" in (tmp_path / "logs/rewards_0.log").read_text())


def test_reuses_processes_until_they_die(make_pool: MakePool) -> None:
    pool = make_pool("misbehave", size=2)
    first, repeated = score(pool, "pid")[0], score(pool, "pid")[0]
    _, survivor = score(pool, "die", "fine")
    assert survivor == Reward(1.0) and isinstance(first, Reward) and isinstance(repeated, Reward)
    pids = {result.reward for result in score(pool, *["pid"] * 40) if isinstance(result, Reward)}
    assert 1 <= len(pids) <= 2 and os.getpid() not in pids


def test_hides_secrets_and_limits_memory(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    short = score(make_pool("misbehave", limits=ProcessLimits(memory_mb=2048)), "memory", "fine", "secret")
    assert isinstance(short[0], RewardFailure) and "it raised MemoryError" in short[0].reason
    assert short[1:] == [Reward(1.0), Reward(0.0)]
    assert score(make_pool("misbehave", limits=ProcessLimits(("HF_TOKEN",), 0)), "secret") == [Reward(1.0)]


def test_returns_results_by_function_name(make_pool: MakePool) -> None:
    pool = make_pool("misbehave", "constant", "misbehave_async", size=3)
    results = pool.submit(rollout("raise")).result(60)
    assert list(results) == ["misbehave", "constant", "misbehave_async"]
    assert (
        results["constant"] == Reward(1.0)
        and isinstance(results["misbehave"], RewardFailure)
        and isinstance(results["misbehave_async"], RewardFailure)
    )


def test_awaits_many_coroutines_in_one_process(make_pool: MakePool) -> None:
    """Each coroutine waits until all twenty run in the same process."""
    assert score(make_pool("meet"), *[f"20/{i}" for i in range(20)], name="meet") == [Reward(1.0)] * 20


def test_cancels_coroutines_at_the_timeout(make_pool: MakePool) -> None:
    results = score(make_pool("misbehave_async", limit=0.5), "wait", "fine", "swallow", name="misbehave_async")
    assert results[1] == Reward(1.0)
    assert all(
        isinstance(item, RewardFailure) and "took longer than reward.timeout=0.5 s" in item.reason
        for item in results[::2]
    )


@pytest.mark.parametrize(
    ("behavior", "message"),
    [("die", "exit status 7"), ("fault", "SIGSEGV"), ("spin", "took longer than reward.timeout=1")],
)
def test_a_coroutine_that_kills_its_process_fails_alone(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, behavior: str, message: str
) -> None:
    """The other coroutines of the process run again, one by one."""
    monkeypatch.setattr("megarl.rewards.reward_pool.GRACE_S", 1.0)
    results = score(
        make_pool("misbehave_async", limit=1.0), "fine", behavior, "fine", "turns", "fine", name="misbehave_async"
    )
    assert [item == Reward(1.0) for item in results] == [True, False, True, False, True]
    assert isinstance(results[1], RewardFailure) and message in results[1].reason
    assert results[3] == Reward(0.0, {"style": 2.0}, (0.25, 0.5))


def test_kills_child_processes_of_hanging_functions(make_pool: MakePool, tmp_path: Path) -> None:
    """The timeout and `close` both kill a function with its children, including those in other sessions."""
    pid_file = tmp_path / "pids"
    (result,) = score(make_pool("misbehave", limit=4.0), f"hang_with_children/{pid_file}")
    assert isinstance(result, RewardFailure) and "took longer" in result.reason
    assert len(read_pids(pid_file)) == 2 and have_exited(read_pids(pid_file))
    pid_file.unlink()
    pool = make_pool("misbehave")
    pool.submit(rollout(f"hang_with_children/{pid_file}"))
    assert wait_until(lambda: pid_file.exists() and len(read_pids(pid_file)) == 2)
    pool.close()
    assert have_exited(read_pids(pid_file))
    assert pool.submit(rollout("fine")).future.cancelled()
    pool.close()


def test_removes_semaphores_of_killed_processes(make_pool: MakePool, tmp_path: Path) -> None:
    behaviors = ("hang", "killed", "die", "fault")
    samples = [f"semaphores/{behavior}{tmp_path}/{behavior}" for behavior in behaviors]
    for behavior, result in zip(behaviors, score(make_pool("misbehave", limit=4.0), *samples), strict=True):
        assert isinstance(result, RewardFailure), (behavior, result)
        names = (tmp_path / behavior).read_text().split()
        assert len(names) == 3 and names[0].startswith("/mp-")
        assert wait_until(lambda names=names: not any(Path(f"/dev/shm/sem.{name[1:]}").exists() for name in names)), (
            behavior
        )


@pytest.mark.parametrize("victim", ["rank", "fork_server"])
def test_no_process_outlives_a_killed_rank(tmp_path: Path, victim: str) -> None:
    pid_file, log = tmp_path / "pids", tmp_path / "log"
    script = f"""
import sys, time
from pathlib import Path
from megarl.rewards.functions import load_functions
from megarl.rewards.reward_pool import RewardPool
from megarl.types import Prompt, Rollout, Turn
specs = ["misbehaving_rewards:misbehave"]
pool = RewardPool(load_functions(specs), specs, 600.0, 1, Path({str(log)!r}))
pool.start(); pool.wait_ready()
pool.submit(Rollout(Prompt("hang_with_children/{pid_file}", ()), (Turn((1,)),)))
print(pool._fork_server._process.pid, flush=True)
time.sleep(600)
"""
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", script], env=dict(os.environ, PYTHONPATH=path), stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        fork_server = int(rank.stdout.readline())
        assert wait_until(lambda: pid_file.exists() and len(read_pids(pid_file)) == 2)
        pids = [*read_pids(pid_file), fork_server, *descendants(fork_server)]
        assert len(pids) >= 5
        if victim == "fork_server":  # the rank still owns the worker processes, which end with it
            os.kill(fork_server, signal.SIGKILL)
        rank.kill()
    assert have_exited(pids)


def test_replaces_a_lost_fork_server(make_pool: MakePool) -> None:
    pool = make_pool("misbehave")
    assert score(pool, "fine") == [Reward(1.0)]
    process: Any = pool._fork_server._process
    process.kill()
    process.wait()
    results = score(pool, "die", "fine")
    assert isinstance(results[0], RewardFailure) and results[1] == Reward(1.0)
    assert pool._fork_server._process is not process


def test_names_functions_that_fail_to_load_in_a_process(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool = make_pool("misbehave", limits=ProcessLimits(pass_env=("REWARDS_BREAK",)))
    monkeypatch.setenv("REWARDS_BREAK", "1")
    pool.start()
    message = "another process could not load it: reward.functions: cannot import misbehaving_rewards .*no licence"
    with pytest.raises(ConfigError, match=message) as error:
        pool.wait_ready()
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    (result,) = score(pool, "fine")
    assert isinstance(result, RewardFailure) and "no licence in another process" in result.reason


def test_unpicklable_rollouts_fail_alone(make_pool: MakePool) -> None:
    pool = make_pool("misbehave")
    unpicklable = Rollout(Prompt("fine", (), extra={"lock": lambda: 0}), (Turn((1,)),))
    result = pool.submit(unpicklable).result(60)["misbehave"]
    assert isinstance(result, RewardFailure) and "cannot be sent to its process" in result.reason
    assert score(pool, "fine") == [Reward(1.0)]


def read_pids(pid_file: Path) -> list[int]:
    return [int(pid) for pid in pid_file.read_text().split()]


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [item for child in map(int, children) for item in (child, *descendants(child))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def have_exited(pids: list[int]) -> bool:
    return wait_until(lambda: not any(map(is_running, pids)))


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return result
