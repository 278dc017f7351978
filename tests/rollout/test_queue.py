"""Tickets: each group goes to one of those who ask."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

from megarl.rollout.group_queue import Counts, Tickets


def test_each_ticket_is_given_once_whoever_asks() -> None:
    counts, got = Counts(), [[] for _ in range(8)]

    def ask(own: list[int]) -> None:
        tickets = Tickets(1000, 8, counts, "step")
        while (number := tickets.take()) is not None:
            own.append(number)

    threads = [Thread(target=ask, args=(own,)) for own in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for own in got for number in own) == list(range(1000))
    assert Tickets(1000, 8, counts, "step").taken() == 1000
    assert Tickets(3, 8, counts, "next step").take() == 0


def test_what_was_finished_is_counted_by_all() -> None:
    counts = Counts()
    one, other = (Tickets(5, 2, counts, "step") for _ in range(2))
    assert [one.finish(), other.finish(), one.finish()] == [0, 1, 2]
    assert one.finished() == other.finished() == 3 and one.taken() == 0


def test_what_is_given_back_is_taken_once_whoever_asks() -> None:
    counts, got = Counts(), [[] for _ in range(4)]
    givers = [Tickets(8, 4, counts, "step") for _ in range(2)]

    def ask(own: list[int]) -> None:
        tickets = Tickets(8, 4, counts, "step")
        while len(got[0]) + len(got[1]) + len(got[2]) + len(got[3]) < 200:
            if (back := tickets.take_back()) is not None:
                own.append(back)

    threads = [Thread(target=ask, args=(own,)) for own in got]
    for thread in threads:
        thread.start()
    for number in range(200):
        givers[number % 2].give_back(number)
    for thread in threads:
        thread.join()
    assert sorted(number for own in got for number in own) == list(range(200))
    assert givers[0].take_back() is None and givers[0].left() == 8
    givers[0].give_back((3, "group"))
    givers[0].take()
    assert givers[1].left() == 8 and givers[1].take_back() == (3, "group") and givers[1].left() == 7


def test_lost_engines_and_steps_are_counted_by_themselves() -> None:
    counts = Counts()
    one, other = (Tickets(5, 2, counts, "step") for _ in range(2))
    assert [one.lost(1), other.lost(), other.lost(1), one.lost(-1)] == [1, 1, 2, 1]
    assert [one.finish(4), other.finish(4), one.finish(8)] == [0, 1, 0]
    assert (other.finished(4), one.finished(8), one.finished()) == (2, 1, 0)


def test_a_share_is_even_and_includes_what_is_gone_on_with() -> None:
    assert [Tickets(groups, 4).share for groups in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert Tickets(5, 4, carried=4).share == 3


def test_the_counters_of_a_job_are_those_of_all_its_ranks(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    results = run_ranks(2, "tests/rollout/ranks_queue.py", timeout=180.0)
    assert sorted(number for result in results for number in result["got"]) == list(range(200))
    assert sorted(place for result in results for place in result["places"]) == list(range(200))
    assert [result["finished"] for result in results] == [200, 200]
    assert sorted(size for result in results for size in result["back"]) == [3, 9 << 20]  # also what is large
    assert [result["left"] for result in results] == [0, 0]
