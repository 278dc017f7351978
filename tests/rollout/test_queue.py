"""Tickets: each group goes to one of those who ask."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

from megarl.rollout.queue import Counts, Tickets


def test_each_ticket_is_given_once_whoever_asks() -> None:
    counts, got = Counts(), [[] for _ in range(8)]

    def ask(own: list[int]) -> None:
        tickets = Tickets(1000, 8, counts.add, "step")
        while (number := tickets.take()) is not None:
            own.append(number)

    threads = [Thread(target=ask, args=(own,)) for own in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for own in got for number in own) == list(range(1000))
    assert Tickets(1000, 8, counts.add, "step").taken() == 1000
    assert Tickets(3, 8, counts.add, "next step").take() == 0


def test_what_was_finished_is_counted_by_all() -> None:
    counts = Counts()
    one, other = (Tickets(5, 2, counts.add, "step") for _ in range(2))
    assert [one.finish(), other.finish(), one.finish()] == [0, 1, 2]
    assert one.finished() == other.finished() == 3 and one.taken() == 0


def test_a_share_is_even_and_includes_what_is_gone_on_with() -> None:
    assert [Tickets(groups, 4).share for groups in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert Tickets(5, 4, carried=4).share == 3


def test_the_counters_of_a_job_are_those_of_all_its_ranks(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    results = run_ranks(2, "tests/rollout/ranks_queue.py", timeout=180.0)
    assert sorted(number for result in results for number in result["got"]) == list(range(200))
    assert sorted(place for result in results for place in result["places"]) == list(range(200))
    assert [result["finished"] for result in results] == [200, 200]
