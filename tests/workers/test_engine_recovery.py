"""What all ranks make of engines that are lost: who is there, what is said, and when a run ends by it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from thread_ranks import Thread, as_ranks

from megarl.config import Config, ConfigError
from megarl.engine.engine_protocol import EngineLost
from megarl.workers import engine_recovery as module
from megarl.workers.engine_recovery import EngineRecovery


class Played:
    """What starts an engine. fails: whether the next start does."""

    def __init__(self) -> None:
        self.lost: EngineLost | None = None
        self.fails, self.begun = False, 0

    def check(self) -> None:
        return None

    def pop_error(self) -> EngineLost | None:
        result, self.lost = self.lost, None
        return result

    def ensure_started(self) -> None:
        self.begun += 1

    def wait(self) -> float:
        if self.fails:
            self.lost = EngineLost("did not start again", "no memory; the last lines")
            self.fails = False
        return 2.0


def ranks_of(monkeypatch: pytest.MonkeyPatch, work: Any) -> list[Any]:
    """work(rank, its recovery, what starts its engine) on each of three ranks, of which two lead an engine."""
    said: list[str] = []
    local_items: dict[int, Thread] = {}

    def one(rank: Thread) -> Any:
        local_items[threading.get_ident()] = rank
        index = rank.rank if rank.rank < 2 else None
        played: Any = Played() if index is not None else None
        say = said.append if rank.rank == 0 else lambda line: None
        local = EngineRecovery(Config(), 2, index, played, index is not None, say)
        return work(rank.rank, local, played)

    def gathered(value: Any) -> list[Any]:
        return local_items[threading.get_ident()].all_gather_objects(value)

    monkeypatch.setattr(module.ranks, "all_gather_objects", gathered)
    return [*as_ranks(3, one), said]


def test_all_ranks_know_who_is_away_and_who_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, local: EngineRecovery, played: Played) -> dict[str, float]:
        assert (
            not local.exchange_losses()
            and local.has_available_engine
            and local.is_available(1)
            and not local.is_available(None)
        )
        if rank == 1:
            played.lost = EngineLost("died", "engine 1 is not running; the last lines", 1.5)
        assert local.exchange_losses()
        assert (local.restarting, local.unsynced, local.has_available_engine, local.is_available(1)) == (
            {1},
            set(),
            True,
            False,
        )
        if rank == 1:
            played.fails = True
        local.wait_restarts()
        assert (local.restarting, local.unsynced, local.is_available(1), local.is_available(0)) == (
            set(),
            {1},
            False,
            True,
        )
        assert rank != 1 or played.begun == 2
        local.on_weight_sync(False)  # then nobody has them
        assert local.unsynced == {0, 1} and not local.has_available_engine
        local.on_weight_sync(True)
        assert local.is_available(0) and local.is_available(1) and not local.exchange_losses()
        return local.metrics()

    *figures, said = ranks_of(monkeypatch, work)
    expected = {"rollout/engine_restarts": 2.0, "time/engine_detection": 1.5, "time/engine_restart": 2.0}
    assert figures == [expected] * 3
    assert [line.partition("(")[0].strip() for line in said] == [
        "engine 1 died and is being restarted",
        "engine 1 did not start again and is being restarted",
        "engine 1 restarted, 2.0 s after its loss was detected",
    ]


@pytest.mark.parametrize("again", ["died", "hangs"])
def test_the_same_fault_twice_without_a_step_between_ends_the_run(monkeypatch: pytest.MonkeyPatch, again: str) -> None:
    def work(rank: int, local: EngineRecovery, played: Played) -> str:
        def lose(fault: Any) -> None:
            if rank == 0:
                played.lost = EngineLost(fault, "engine 0 is not running; the last lines of its log: short of memory")
            local.exchange_losses()
            local.wait_restarts()
            local.on_weight_sync(True)

        lose("died")
        local.begin_step()
        assert local.metrics() == {}
        lose("died")
        try:
            lose(again)
        except ConfigError as error:
            return str(error)
        return ""

    *errors, _ = ranks_of(monkeypatch, work)
    assert len(set(errors)) == 1
    if again == "died":
        assert errors[0].startswith("engine 0 died twice in a row without a completed step: see its log; ")
        assert errors[0].endswith("engine 0 is not running; the last lines of its log: short of memory")
    else:
        assert errors[0] == ""


def test_another_failure_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, local: EngineRecovery, played: Played) -> str:
        with pytest.raises(ConfigError) as error:
            local.exchange_losses("the tools are gone" if rank == 1 else "")
        return str(error.value)

    *errors, _ = ranks_of(monkeypatch, work)
    assert errors == ["the tools are gone"] * 3
