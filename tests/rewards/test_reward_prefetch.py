"""Prefetched rewards are found by their rollout, and dropped with it."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from dataclasses import replace

import pytest

from megarl.types import Prompt, Rollout, Turn
from megarl.workers.reward import RewardPrefetch

pytestmark = pytest.mark.alone


def test_pops_prefetched_rewards_by_rollout() -> None:
    scored: list[Rollout] = []

    def submit(rollout: Rollout) -> Future[int]:
        scored.append(rollout)
        result = Future[int]()
        result.set_result(len(scored))
        return result

    def pop(rollout: Rollout) -> tuple[int, bool]:
        future, is_prefetched = prefetch.pop(rollout)
        return future.result(), is_prefetched

    prefetch = RewardPrefetch(submit)
    first, second, third = (Rollout(Prompt("p", ()), (Turn((1,)), Turn((2,), (0.0,), True)), seed=5) for _ in range(3))
    prefetch.on_rollout_finished(first)
    prefetch.on_rollout_finished(second)
    assert pop(replace(second, group=7, routing=None)) == (2, True)
    assert pop(first) == (1, True) and len(scored) == 2
    assert pop(third) == (3, False), "it was not prefetched"
    assert pop(first) == (4, False), "it was popped before"
    prefetch.on_rollout_finished(third)
    scored.clear()
    assert len(prefetch._pending) == 1
    del third
    gc.collect()
    assert not prefetch._pending
