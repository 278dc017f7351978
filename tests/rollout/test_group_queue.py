"""`GroupQueue`: engines share groups, and each group goes to one of them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

from megarl.rollout.group_queue import GroupQueue, LocalKVStore


def test_concurrent_claims_hand_out_each_group_once() -> None:
    store, claimed = LocalKVStore(), [[] for _ in range(8)]

    def claim_all(numbers: list[int]) -> None:
        queue = GroupQueue(1000, 8, store, "step")
        while (number := queue.claim()) is not None:
            numbers.append(number)

    threads = [Thread(target=claim_all, args=(numbers,)) for numbers in claimed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for numbers in claimed for number in numbers) == list(range(1000))
    assert GroupQueue(1000, 8, store, "step").count_claimed() == 1000
    assert GroupQueue(3, 8, store, "next step").claim() == 0


def test_returned_groups_are_claimed_once() -> None:
    store, claimed = LocalKVStore(), [[] for _ in range(4)]
    queues = [GroupQueue(8, 4, store, "step") for _ in range(2)]

    def claim_all(numbers: list[int]) -> None:
        queue = GroupQueue(8, 4, store, "step")
        while len(claimed[0]) + len(claimed[1]) + len(claimed[2]) + len(claimed[3]) < 200:
            if (returned := queue.claim_returned()) is not None:
                numbers.append(returned)

    threads = [Thread(target=claim_all, args=(numbers,)) for numbers in claimed]
    for thread in threads:
        thread.start()
    for number in range(200):
        queues[number % 2].return_group(number)
    for thread in threads:
        thread.join()
    assert sorted(number for numbers in claimed for number in numbers) == list(range(200))
    assert queues[0].claim_returned() is None and queues[0].count_unclaimed() == 8
    queues[0].return_group((3, "group"))
    queues[0].claim()
    assert (
        queues[1].count_unclaimed() == 8
        and queues[1].claim_returned() == (3, "group")
        and queues[1].count_unclaimed() == 7
    )


def test_lost_engines_and_versions_have_separate_counters() -> None:
    store = LocalKVStore()
    first, second = (GroupQueue(5, 2, store, "step") for _ in range(2))
    assert [
        first.count_lost_engines(1),
        second.count_lost_engines(),
        second.count_lost_engines(1),
        first.count_lost_engines(-1),
    ] == [1, 1, 2, 1]
    assert [first.next_place(4), second.next_place(4), first.next_place(8)] == [0, 1, 0]
    first.mark_complete(4, 1)
    assert [second.is_complete(*which) for which in ((4, 1), (4, 0), (8, 1))] == [True, False, False]
    second.unmark(4, 1)
    assert not first.is_complete(4, 1)


def test_engine_share_is_even() -> None:
    assert [GroupQueue(groups, 4).groups_per_engine for groups in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_numbers_start_at_the_first() -> None:
    queue = GroupQueue(2, first=5)
    assert [queue.claim(), queue.claim(), queue.claim()] == [5, 6, None] and queue.count_claimed() == 2


def test_ranks_of_a_job_share_the_counters(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    results = run_ranks(2, "tests/rollout/ranks_queue.py", timeout=180.0)
    assert sorted(number for result in results for number in result["claimed"]) == list(range(200))
    assert sorted(order for result in results for order in result["completion_order"]) == list(range(200))
    assert [result["finished"] for result in results] == [200, 200]
    assert sorted(size for result in results for size in result["returned"]) == [3, 9 << 20]  # large groups, too
    assert [result["unclaimed"] for result in results] == [0, 0]
