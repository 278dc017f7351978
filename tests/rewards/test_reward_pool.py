"""Whatever a reward function does, in real processes: only that call fails, and nothing of it is left."""

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
Made = Callable[..., RewardPool]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.syspath_prepend(HERE)
    pools = []

    def make(*names: str, limit: float = 60.0, size: int = 1, limits: ProcessLimits = NO_LIMITS) -> RewardPool:
        specs = [f"odd_rewards:{name}" for name in names]
        pools.append(RewardPool(load_functions(specs), specs, limit, size, tmp_path / "logs/rewards_0.log", limits))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def rollout(sample: str) -> Rollout:
    turns = (Turn((1, 2)), Turn((3,), (0.0,), True), Turn((4,)), Turn((5,), (0.0,), True))
    return Rollout(Prompt(sample, ()), turns, group=3, reward=2.0)


def verdicts(pool: RewardPool, *samples: str, name: str = "odd") -> list[RewardResult]:
    begun = [pool.submit(rollout(sample)) for sample in samples]
    return [item.result(120)[name] for item in begun]


def test_each_way_to_fail_fails_alone(made: Made, tmp_path: Path) -> None:
    """One process, of which each next call needs a new one where the last has died."""
    hows = ("fine", "nan", "large", "text", "raise", "exit", "die", "fault", "killed", "hang", "spin", "close")
    said = dict(zip(hows, verdicts(made("odd", limit=1.5), *hows), strict=True))
    assert said.pop("fine") == Reward(1.0)
    complaints = {
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
    for how, complaint in complaints.items():
        result = said[how]
        assert isinstance(result, RewardFailure) and complaint in result.reason and "\n" not in result.reason, (
            how,
            result,
        )
    assert (HERE / "odd_rewards.py").name in said["raise"].reason  # type: ignore[union-attr]
    log = (tmp_path / "logs/rewards_0.log").read_text()
    assert "Bad file descriptor" in log
    for how in complaints:  # beside what it has printed, also where that is nothing
        assert f"  odd of prompt '{how}': {said[how].reason}\n" in log  # type: ignore[union-attr]
    assert "'fine'" not in log


def test_what_a_function_may_do(made: Made, tmp_path: Path) -> None:
    """It may print, use an alarm of its own, and say something of each turn; it is shown a copy without routing."""
    said = verdicts(made("odd"), "print", "alarm", "turns", "whole", "too many", "routing")
    assert said[:4] == [Reward(0.5), Reward(0.75), Reward(0.0, {"style": 2.0}, (0.25, 0.5))] + [
        Reward(1.0, {"style": 2.0}, (0.5, 0.25))
    ]
    assert isinstance(said[4], RewardFailure) and "3 `turns` for 2 turns of the policy's" in said[4].reason
    assert said[5] == Reward(1.0)
    assert eventually(lambda: "said by a function" in (tmp_path / "logs/rewards_0.log").read_text())


def test_a_process_is_kept_until_it_dies_and_all_are_used(made: Made) -> None:
    pool = made("odd", size=2)
    first, again = verdicts(pool, "pid")[0], verdicts(pool, "pid")[0]
    _, other = verdicts(pool, "die", "fine")
    assert other == Reward(1.0) and isinstance(first, Reward) and isinstance(again, Reward)
    result = {said.reward for said in verdicts(pool, *["pid"] * 40) if isinstance(said, Reward)}
    assert 1 <= len(result) <= 2 and os.getpid() not in result


def test_functions_have_no_secrets_and_so_much_memory(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    short = verdicts(made("odd", limits=ProcessLimits(memory_mb=2048)), "memory", "fine", "secret")
    assert isinstance(short[0], RewardFailure) and "it raised MemoryError" in short[0].reason
    assert short[1:] == [Reward(1.0), Reward(0.0)]
    assert verdicts(made("odd", limits=ProcessLimits(("HF_TOKEN",), 0)), "secret") == [Reward(1.0)]


def test_several_functions_are_told_apart(made: Made) -> None:
    pool = made("odd", "one", "aodd", size=3)
    said = pool.submit(rollout("raise")).result(60)
    assert list(said) == ["odd", "one", "aodd"]
    assert (
        said["one"] == Reward(1.0)
        and isinstance(said["odd"], RewardFailure)
        and isinstance(said["aodd"], RewardFailure)
    )


def test_coroutine_functions_are_awaited_many_at_once_in_a_process(made: Made) -> None:
    """Each waits until all twenty are at it in the one process."""
    assert verdicts(made("meets"), *[f"20/{i}" for i in range(20)], name="meets") == [Reward(1.0)] * 20


def test_a_coroutine_that_waits_for_ever_is_cancelled(made: Made) -> None:
    said = verdicts(made("aodd", limit=0.5), "wait", "fine", "swallow", name="aodd")
    assert said[1] == Reward(1.0)
    assert all(
        isinstance(item, RewardFailure) and "took longer than reward.timeout=0.5 s" in item.reason for item in said[::2]
    )


@pytest.mark.parametrize(
    ("how", "complaint"),
    [("die", "exit status 7"), ("fault", "SIGSEGV"), ("spin", "took longer than reward.timeout=1")],
)
def test_a_coroutine_that_takes_its_process_with_it_fails_alone(
    made: Made, monkeypatch: pytest.MonkeyPatch, how: str, complaint: str
) -> None:
    """The others of the process are called again, one by one."""
    monkeypatch.setattr("megarl.rewards.reward_pool.GRACE_S", 1.0)
    said = verdicts(made("aodd", limit=1.0), "fine", how, "fine", "turns", "fine", name="aodd")
    assert [item == Reward(1.0) for item in said] == [True, False, True, False, True]
    assert isinstance(said[1], RewardFailure) and complaint in said[1].reason
    assert said[3] == Reward(0.0, {"style": 2.0}, (0.25, 0.5))


def test_all_is_waited_for_or_nothing_is_left(made: Made, tmp_path: Path) -> None:
    """A function that hangs is killed with what it has started, in sessions of their own, too; so it is by `close`."""
    mark = tmp_path / "pids"
    (said,) = verdicts(made("odd", limit=4.0), f"leave/{mark}")
    assert isinstance(said, RewardFailure) and "took longer" in said.reason
    assert len(left(mark)) == 2 and gone(left(mark))
    mark.unlink()
    pool = made("odd")
    pool.submit(rollout(f"leave/{mark}"))
    assert eventually(lambda: mark.exists() and len(left(mark)) == 2)
    pool.close()
    assert gone(left(mark))
    assert pool.submit(rollout("fine")).future.cancelled()
    pool.close()


def test_semaphores_of_what_is_killed_do_not_stay_in_shared_memory(made: Made, tmp_path: Path) -> None:
    hows = ("hang", "killed", "die", "fault")
    samples = [f"semaphores/{how}{tmp_path}/{how}" for how in hows]
    for how, said in zip(hows, verdicts(made("odd", limit=4.0), *samples), strict=True):
        assert isinstance(said, RewardFailure), (how, said)
        names = (tmp_path / how).read_text().split()
        assert len(names) == 3 and names[0].startswith("/mp-")
        assert eventually(lambda names=names: not any(Path(f"/dev/shm/sem.{name[1:]}").exists() for name in names)), how


@pytest.mark.parametrize("victim", ["rank", "nursery"])
def test_nothing_outlives_a_rank_that_is_killed(tmp_path: Path, victim: str) -> None:
    mark, log = tmp_path / "pids", tmp_path / "log"
    script = f"""
import sys, time
from pathlib import Path
from megarl.rewards.functions import load_functions
from megarl.rewards.reward_pool import RewardPool
from megarl.types import Prompt, Rollout, Turn
specs = ["odd_rewards:odd"]
pool = RewardPool(load_functions(specs), specs, 600.0, 1, Path({str(log)!r}))
pool.start(); pool.wait_ready()
pool.submit(Rollout(Prompt("leave/{mark}", ()), (Turn((1,)),)))
print(pool._fork_server._process.pid, flush=True)
time.sleep(600)
"""
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", script], env=dict(os.environ, PYTHONPATH=path), stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        nursery = int(rank.stdout.readline())
        assert eventually(lambda: mark.exists() and len(left(mark)) == 2)
        pids = [*left(mark), nursery, *descendants(nursery)]
        assert len(pids) >= 5
        if victim == "nursery":  # the processes go on, for the rank has them; and end with it
            os.kill(nursery, signal.SIGKILL)
        rank.kill()
    assert gone(pids)


def test_a_nursery_that_is_lost_is_replaced(made: Made) -> None:
    pool = made("odd")
    assert verdicts(pool, "fine") == [Reward(1.0)]
    process: Any = pool._fork_server._process
    process.kill()
    process.wait()
    said = verdicts(pool, "die", "fine")
    assert isinstance(said[0], RewardFailure) and said[1] == Reward(1.0)
    assert pool._fork_server._process is not process


def test_functions_that_another_process_cannot_have(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool = made("odd", limits=ProcessLimits(pass_env=("REWARDS_BREAK",)))
    monkeypatch.setenv("REWARDS_BREAK", "1")
    pool.start()
    complaint = "another process could not load it: reward.functions: cannot import odd_rewards .*no licence"
    with pytest.raises(ConfigError, match=complaint) as error:
        pool.wait_ready()
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    (said,) = verdicts(pool, "fine")
    assert isinstance(said, RewardFailure) and "no licence in another process" in said.reason


def test_a_conversation_that_cannot_be_sent(made: Made) -> None:
    pool = made("odd")
    odd = Rollout(Prompt("fine", (), extra={"lock": lambda: 0}), (Turn((1,)),))
    said = pool.submit(odd).result(60)["odd"]
    assert isinstance(said, RewardFailure) and "cannot be sent to its process" in said.reason
    assert verdicts(pool, "fine") == [Reward(1.0)]


def left(mark: Path) -> list[int]:
    return [int(pid) for pid in mark.read_text().split()]


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


def gone(pids: list[int]) -> bool:
    return eventually(lambda: not any(map(is_running, pids)))


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not (result := true()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return result
