"""Pending generations: done when all engines are, failed when one is, and complete or an error."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext

import pytest
from thread_ranks import ThreadRank, as_ranks

from megarl.config import ConfigError
from megarl.rollout.group_queue import GroupQueue, LocalKVStore
from megarl.rollout.scheduler import GenerationResult
from megarl.types import Prompt, Rollout, Turn
from megarl.workers.async_rollout import PendingGeneration, newest_version

pytestmark = pytest.mark.alone


def rollout(group: int, *versions: int) -> Rollout:
    turn = Turn(
        (1,) * len(versions), (-1.0,) * len(versions), True, versions[-1], tuple((item, 1) for item in versions)
    )
    return Rollout(Prompt(str(group), ()), (Turn((9,)), turn), group=group)


def collect_on_ranks(*engines: Sequence[Rollout] | str | None, groups: int = 2, start_version: int = 2) -> list[object]:
    """Return each rank's (groups, staleness, newest version), error or "pending".

    engines: each engine's rollouts, error, or None while it generates; rank 0 leads none.
    """
    store = LocalKVStore()

    def run_rank(rank: ThreadRank) -> object:
        queue, future = GroupQueue(groups, len(engines), store), None
        if rank.rank:
            outcome, future = engines[rank.rank - 1], Future()
            if isinstance(outcome, str):
                future.set_exception(RuntimeError(outcome))
            elif outcome is not None:
                for _ in outcome:
                    queue.claim()
                future.set_result(GenerationResult(list(outcome)))
        pending = PendingGeneration(
            future, queue, rank, start_version=start_version, current_version=lambda: 4, wait_phase=nullcontext
        )
        if not pending.is_done():
            return "pending"
        try:
            result = pending.result()
        except ConfigError as error:
            return str(error)
        return result.group.tolist(), result.staleness.tolist(), newest_version(result)

    return as_ranks(1 + len(engines), run_rank)


def test_pending_until_all_engines_are_done() -> None:
    assert collect_on_ranks([rollout(0, 2)], None) == ["pending"] * 3


def test_all_ranks_get_the_result_by_group() -> None:
    assert collect_on_ranks([rollout(1, 2, 3)], [rollout(0, 2)]) == [([0, 1], [2, 2], 3)] * 3


def test_failure_of_one_engine_raises_on_all_ranks() -> None:
    assert collect_on_ranks([rollout(0, 2)], "engine 1 is odd") == ["engine 1 is odd"] * 3


def test_missing_groups_raise() -> None:
    result = collect_on_ranks([rollout(0, 2)], [], groups=3)
    assert result == ["an engine was lost, and with it the answers to 2 prompts"] * 3
