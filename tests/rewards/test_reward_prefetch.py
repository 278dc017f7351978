"""A reward that was begun is found again, and is dropped with the conversation."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from dataclasses import replace

import pytest

from megarl.types import Prompt, Rollout, Turn
from megarl.workers.reward import RewardPrefetch

pytestmark = pytest.mark.alone


def test_found_by_the_conversation_whatever_became_of_it() -> None:
    begun: list[Rollout] = []

    def begin(rollout: Rollout) -> Future[int]:
        begun.append(rollout)
        result = Future[int]()
        result.set_result(len(begun))
        return result

    def taken(rollout: Rollout) -> tuple[int, bool]:
        said, there = ahead.pop(rollout)
        return said.result(), there

    ahead = RewardPrefetch(begin)
    first, second, third = (Rollout(Prompt("p", ()), (Turn((1,)), Turn((2,), (0.0,), True)), seed=5) for _ in range(3))
    ahead.on_rollout_finished(first)
    ahead.on_rollout_finished(second)
    assert taken(replace(second, group=7, routing=None)) == (2, True)
    assert taken(first) == (1, True) and len(begun) == 2
    assert taken(third) == (3, False), "nobody had begun it"
    assert taken(first) == (4, False), "it is asked for again"
    ahead.on_rollout_finished(third)
    begun.clear()
    assert len(ahead._pending) == 1
    del third
    gc.collect()
    assert not ahead._pending
