"""Tickets: each group goes to one of those who ask."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

from megarl.rollout.group_queue import GroupQueue, LocalKVStore


def test_each_ticket_is_given_once_whoever_asks() -> None:
    counts, got = LocalKVStore(), [[] for _ in range(8)]

    def ask(local: list[int]) -> None:
        tickets = GroupQueue(1000, 8, counts, "step")
        while (number := tickets.claim()) is not None:
            local.append(number)

    threads = [Thread(target=ask, args=(local,)) for local in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for local in got for number in local) == list(range(1000))
    assert GroupQueue(1000, 8, counts, "step").count_claimed() == 1000
    assert GroupQueue(3, 8, counts, "next step").claim() == 0


def test_what_was_finished_is_counted_by_all() -> None:
    counts = LocalKVStore()
    item, other = (GroupQueue(5, 2, counts, "step") for _ in range(2))
    assert [item.mark_complete(), other.mark_complete(), item.mark_complete()] == [0, 1, 2]
    assert item.count_complete() == other.count_complete() == 3 and item.count_claimed() == 0


def test_what_is_given_back_is_taken_once_whoever_asks() -> None:
    counts, got = LocalKVStore(), [[] for _ in range(4)]
    givers = [GroupQueue(8, 4, counts, "step") for _ in range(2)]

    def ask(local: list[int]) -> None:
        tickets = GroupQueue(8, 4, counts, "step")
        while len(got[0]) + len(got[1]) + len(got[2]) + len(got[3]) < 200:
            if (back := tickets.claim_returned()) is not None:
                local.append(back)

    threads = [Thread(target=ask, args=(local,)) for local in got]
    for thread in threads:
        thread.start()
    for number in range(200):
        givers[number % 2].return_group(number)
    for thread in threads:
        thread.join()
    assert sorted(number for local in got for number in local) == list(range(200))
    assert givers[0].claim_returned() is None and givers[0].count_unclaimed() == 8
    givers[0].return_group((3, "group"))
    givers[0].claim()
    assert (
        givers[1].count_unclaimed() == 8
        and givers[1].claim_returned() == (3, "group")
        and givers[1].count_unclaimed() == 7
    )


def test_lost_engines_and_steps_are_counted_by_themselves() -> None:
    counts = LocalKVStore()
    item, other = (GroupQueue(5, 2, counts, "step") for _ in range(2))
    assert [
        item.count_lost_engines(1),
        other.count_lost_engines(),
        other.count_lost_engines(1),
        item.count_lost_engines(-1),
    ] == [1, 1, 2, 1]
    assert [item.mark_complete(4), other.mark_complete(4), item.mark_complete(8)] == [0, 1, 0]
    assert (other.count_complete(4), item.count_complete(8), item.count_complete()) == (2, 1, 0)


def test_a_share_is_even_and_includes_what_is_gone_on_with() -> None:
    assert [GroupQueue(groups, 4).groups_per_engine for groups in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert GroupQueue(5, 4, num_partial_groups=4).groups_per_engine == 3


def test_the_counters_of_a_job_are_those_of_all_its_ranks(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    results = run_ranks(2, "tests/rollout/ranks_queue.py", timeout=180.0)
    assert sorted(number for result in results for number in result["got"]) == list(range(200))
    assert sorted(place for result in results for place in result["places"]) == list(range(200))
    assert [result["finished"] for result in results] == [200, 200]
    assert sorted(size for result in results for size in result["back"]) == [3, 9 << 20]  # also what is large
    assert [result["left"] for result in results] == [0, 0]
