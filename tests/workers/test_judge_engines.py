"""Scoring on the job's own engines, with scripted engines: how rollouts are dealt out, and what a loss repeats."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from thread_ranks import ThreadRank, as_ranks

from megarl.engine.engine_protocol import EngineLost
from megarl.types import Prompt, Rollout, Turn
from megarl.types.reward_values import Reward
from megarl.workers import judge_engines as module

pytestmark = pytest.mark.alone

ANSWERS = (("a", "bb", "ccc"), (), ("dddd", "eeeee"))
"""Answers of the rollouts of each rank; the reward is their length."""


class FakeExchange:
    def __init__(self, rank: ThreadRank) -> None:
        self.rank = rank

    def exchange_objects(self, parcels: Mapping[int, Any]) -> dict[int, Any]:
        sent = self.rank.all_gather_objects(dict(parcels))
        return {sender: parcels[self.rank.rank] for sender, parcels in enumerate(sent) if self.rank.rank in parcels}


class FakeEngines:
    """One engine on each of the first two ranks. The second is lost at its first request if `dies`."""

    takes_turns = True

    def __init__(self, rank: ThreadRank, dies: bool) -> None:
        self.rank, self.calls, self.lost = rank, list[str](), False
        self.job, self.recovery, self.engine_restart = SimpleNamespace(rank=rank.rank), self, self
        self.engine_ranks = [(0,), (1,)]
        self.engine_index = rank.rank if rank.rank < 2 else None
        self.lead_engine = SimpleNamespace(dies=dies and rank.rank == 1) if rank.rank < 2 else None
        self.restarting, self.unsynced = set[int](), set[int]()

    def offload_models(self) -> None:
        self.calls.append("offload")

    def wake(self) -> None:
        self.calls.append("wake")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def rejoin(self) -> None:
        self.calls.append("rejoin")
        self.restarting.clear()

    def is_available(self, index: int) -> bool:
        return index not in self.restarting

    def report_lost(self, error: EngineLost) -> None:
        self.lost = True

    def exchange_losses(self, should_check: bool = False) -> bool:
        lost = [index for index, is_lost in enumerate(self.rank.all_gather_objects(self.lost)) if is_lost]
        self.restarting |= set(lost)
        self.lost = False
        return bool(lost)


def score_all(monkeypatch: pytest.MonkeyPatch, dies: bool) -> list[Any]:
    threads: dict[int, ThreadRank] = {}

    def score_on_engine(engine: Any, judge: Any, rollouts: list[Rollout], max_failed: float) -> list[Reward]:
        judge.append((threads[threading.get_ident()].rank, [rollout.answer for rollout in rollouts]))
        if engine.dies:
            engine.dies = False
            raise EngineLost("died", "engine 1 is not running")
        return [Reward(float(len(rollout.answer))) for rollout in rollouts]

    monkeypatch.setattr(module, "_score_on_engine", score_on_engine)
    monkeypatch.setattr(module, "run_on_all", lambda work: work())
    monkeypatch.setattr(module.row_exchange, "get_row_exchange", lambda: FakeExchange(threads[threading.get_ident()]))

    def run_rank(rank: ThreadRank) -> Any:
        threads[threading.get_ident()] = rank
        local = [
            Rollout(Prompt("0", ()), (Turn((1,)),), messages=({"role": "assistant", "content": answer},))
            for answer in ANSWERS[rank.rank]
        ]
        rollouts: Any = SimpleNamespace(local=local, comm=rank)
        engines, asked = FakeEngines(rank, dies), list[Any]()
        results = module.score_on_engines(engines, asked, rollouts, 0.0)  # type: ignore[arg-type]
        return [result.reward for result in results], asked, engines.calls  # type: ignore[union-attr]

    return as_ranks(3, run_rank)


def test_engines_share_the_rollouts_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, first_asked, calls), (second, second_asked, _), (third, third_asked, other_calls) = score_all(
        monkeypatch, dies=False
    )
    assert (first, second, third) == ([1.0, 2.0, 3.0], [], [4.0, 5.0])
    assert first_asked == [(0, ["a", "ccc", "eeeee"])] and second_asked == [(1, ["bb", "dddd"])] and not third_asked
    assert calls == ["offload", "wake", "sleep"] and other_calls == ["wake", "sleep"]


def test_rollouts_of_a_lost_engine_are_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, first_asked, calls), (_, second_asked, _), (third, _, _) = score_all(monkeypatch, dies=True)
    assert (first, third) == ([1.0, 2.0, 3.0], [4.0, 5.0])
    assert first_asked == [(0, ["a", "ccc", "eeeee"]), (0, ["bb"])]
    assert second_asked == [(1, ["bb", "dddd"]), (1, ["dddd"])]
    assert calls == ["offload", "wake", "rejoin", "sleep"]
