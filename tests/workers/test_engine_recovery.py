"""Recovery of lost engines: which engines are available, what is logged, and when the run ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from thread_ranks import ThreadRank, as_ranks

from megarl.config import Config, ConfigError
from megarl.engine.engine_protocol import EngineLost
from megarl.workers import engine_recovery as module
from megarl.workers.engine_recovery import EngineRecovery


class FakeEngineRestart:
    """A fake engine restart. fails_next_start: whether the next start fails."""

    def __init__(self) -> None:
        self.lost: EngineLost | None = None
        self.fails_next_start, self.num_starts = False, 0
        self.engine, self.is_pending = SimpleNamespace(start_number=1), False

    def check(self) -> None:
        return None

    def pop_error(self) -> EngineLost | None:
        result, self.lost = self.lost, None
        return result

    def ensure_started(self) -> None:
        self.num_starts += 1

    def wait(self) -> float:
        if self.fails_next_start:
            self.lost = EngineLost("did not start again", "no memory; the last lines")
            self.fails_next_start = False
        return 2.0


def run_on_ranks(monkeypatch: pytest.MonkeyPatch, work: Any) -> list[Any]:
    """Run work(rank, recovery, restart) on three ranks, two of which lead an engine; return results and log lines."""
    lines: list[str] = []
    threads: dict[int, ThreadRank] = {}

    def run_rank(rank: ThreadRank) -> Any:
        threads[threading.get_ident()] = rank
        index = rank.rank if rank.rank < 2 else None
        restart: Any = FakeEngineRestart() if index is not None else None
        log = lines.append if rank.rank == 0 else lambda line: None
        recovery = EngineRecovery(Config(), 2, index, restart, index is not None, log)
        return work(rank.rank, recovery, restart)

    def all_gather_objects(value: Any) -> list[Any]:
        return threads[threading.get_ident()].all_gather_objects(value)

    monkeypatch.setattr(module.ranks, "all_gather_objects", all_gather_objects)
    return [*as_ranks(3, run_rank), lines]


def test_all_ranks_agree_on_lost_and_restarted_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, recovery: EngineRecovery, restart: FakeEngineRestart) -> dict[str, float]:
        assert (
            not recovery.exchange_losses()
            and recovery.has_available_engine
            and recovery.is_available(1)
            and not recovery.is_available(None)
        )
        if rank == 1:
            restart.lost = EngineLost("died", "engine 1 is not running; the last lines", 1.5)
        assert recovery.exchange_losses()
        assert (recovery.restarting, recovery.unsynced, recovery.has_available_engine, recovery.is_available(1)) == (
            {1},
            set(),
            True,
            False,
        )
        if rank == 1:
            restart.fails_next_start = True
        recovery.wait_restarts()
        assert (recovery.restarting, recovery.unsynced, recovery.is_available(1), recovery.is_available(0)) == (
            set(),
            {1},
            False,
            True,
        )
        assert rank != 1 or restart.num_starts == 2
        recovery.on_weight_sync(False)  # no engine has the weights
        assert recovery.unsynced == {0, 1} and not recovery.has_available_engine
        recovery.on_weight_sync(True)
        assert recovery.is_available(0) and recovery.is_available(1) and not recovery.exchange_losses()
        return recovery.metrics()

    *metrics, lines = run_on_ranks(monkeypatch, work)
    expected = {"rollout/engine_restarts": 2.0, "time/engine_detection": 1.5, "time/engine_restart": 2.0}
    assert metrics == [expected] * 3
    assert [line.partition("(")[0].strip() for line in lines] == [
        "engine 1 died and is being restarted",
        "engine 1 did not start again and is being restarted",
        "engine 1 restarted, 2.0 s after its loss was detected",
    ]


@pytest.mark.parametrize("repeated_fault", ["died", "hangs"])
def test_same_fault_twice_without_a_step_ends_the_run(monkeypatch: pytest.MonkeyPatch, repeated_fault: str) -> None:
    def work(rank: int, recovery: EngineRecovery, restart: FakeEngineRestart) -> str:
        def lose_engine(fault: Any) -> None:
            if rank == 0:
                restart.lost = EngineLost(fault, "engine 0 is not running; the last lines of its log: short of memory")
            recovery.exchange_losses()
            recovery.wait_restarts()
            recovery.on_weight_sync(True)

        lose_engine("died")
        recovery.begin_step()
        assert recovery.metrics() == {}
        lose_engine("died")
        try:
            lose_engine(repeated_fault)
        except ConfigError as error:
            return str(error)
        return ""

    *errors, _ = run_on_ranks(monkeypatch, work)
    assert len(set(errors)) == 1
    if repeated_fault == "died":
        assert errors[0].startswith("engine 0 died twice in a row without a completed step: see its log; ")
        assert errors[0].endswith("engine 0 is not running; the last lines of its log: short of memory")
    else:
        assert errors[0] == ""


@pytest.mark.parametrize("when", ["before the error is read", "after it is read"])
def test_a_loss_while_losses_are_exchanged_is_recorded_once(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    class LostMeanwhile(FakeEngineRestart):
        def lose(self) -> None:  # as `EngineRestart.report_lost` in another thread
            if not self.is_pending:
                self.lost, self.is_pending = EngineLost("died", "engine 1 is not running"), True

        def pop_error(self) -> EngineLost | None:
            if when == "before the error is read":
                self.lose()
            result = super().pop_error()
            self.lose()
            return result

    def work(rank: int, recovery: EngineRecovery, restart: FakeEngineRestart) -> Any:
        if rank == 1:
            restart.__class__ = LostMeanwhile
        first = recovery.exchange_losses(), set(recovery.restarting)
        assert first == ((True, {1}) if when == "before the error is read" else (False, set()))
        assert recovery.exchange_losses() == (not first[0])
        return recovery.restarting, recovery.restarts

    *states, _ = run_on_ranks(monkeypatch, work)
    assert states == [({1}, 1)] * 3


@pytest.mark.parametrize("waits", [False, True])
def test_an_engine_lost_for_one_policy_lacks_the_weights_of_the_other(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    def work(rank: int, recovery: EngineRecovery, restart: FakeEngineRestart) -> None:
        other = EngineRecovery(Config(), 2, recovery._engine_index, restart, restart is not None, lambda line: None)
        assert not other.exchange_losses()
        if rank == 1:  # it has been lost for the first policy, which has begun its restart
            restart.engine.start_number, restart.is_pending = 2, not waits
        assert not other.exchange_losses()
        assert (other.restarting, other.unsynced) == ((set(), {1}) if waits else ({1}, set()))
        if not waits:
            if rank == 1:
                restart.is_pending = False
            other.wait_restarts()
            assert (other.restarting, other.unsynced) == (set(), {1})
        other.on_weight_sync(True)
        assert not other.exchange_losses() and not other.restarting and not other.unsynced

    run_on_ranks(monkeypatch, work)


def test_other_failures_raise_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, recovery: EngineRecovery, restart: FakeEngineRestart) -> str:
        with pytest.raises(ConfigError) as error:
            recovery.exchange_losses("the tools are gone" if rank == 1 else "")
        return str(error.value)

    *errors, _ = run_on_ranks(monkeypatch, work)
    assert errors == ["the tools are gone"] * 3
