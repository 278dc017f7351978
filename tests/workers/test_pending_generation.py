"""A generation beside training, as its ranks have it: over when all are, failed when one has, whole or an error."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext

import pytest
from thread_ranks import Thread, as_ranks

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


def three_ranks(*engines: Sequence[Rollout] | str | None, groups: int = 2, begun: int = 2) -> list[object]:
    """engines: what comes of each, a failure, or None while it is at it; rank 0 leads none. Of each rank: whether it is
    over, and then groups, lags and newest version, or the error."""
    board = LocalKVStore()

    def of(rank: Thread) -> object:
        tickets, mine = GroupQueue(groups, len(engines), board), None
        if rank.rank:
            comes, mine = engines[rank.rank - 1], Future()
            if isinstance(comes, str):
                mine.set_exception(RuntimeError(comes))
            elif comes is not None:
                for _ in comes:
                    tickets.claim()
                mine.set_result(GenerationResult(list(comes), []))
        it = PendingGeneration(
            mine, tickets, rank, start_version=begun, current_version=lambda: 4, wait_phase=nullcontext
        )
        if not it.is_done():
            return "under way"
        try:
            result = it.result()
        except ConfigError as error:
            return str(error)
        return result.group.tolist(), result.staleness.tolist(), newest_version(result)

    return as_ranks(1 + len(engines), of)


def test_it_is_over_when_no_engine_has_anything_under_way() -> None:
    assert three_ranks([rollout(0, 2)], None) == ["under way"] * 3


def test_all_ranks_have_the_same_of_it_by_group() -> None:
    assert three_ranks([rollout(1, 2, 3)], [rollout(0, 2)]) == [([0, 1], [2, 2], 3)] * 3


def test_a_failure_is_one_of_all() -> None:
    assert three_ranks([rollout(0, 2)], "engine 1 is odd") == ["engine 1 is odd"] * 3


def test_answers_that_nobody_has_are_an_error() -> None:
    result = three_ranks([rollout(0, 2)], [], groups=3)
    assert result == ["an engine was lost, and with it the answers to 2 prompts"] * 3
