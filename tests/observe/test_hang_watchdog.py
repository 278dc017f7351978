"""What is said of ranks that hang; that they are seen is in `test_hanging_ranks.py`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.clock import WAIT, Clock
from megarl.observe.hang_watchdog import margin, read_stack_state, summarize_states

pytestmark = pytest.mark.alone

LOGS = Path("runs/x/logs")


def said(waits: bool, where: str, stacks: bool = True, silent: bool = False) -> dict[str, Any]:
    return {"waits": waits, "where": where, "stacks": stacks, "silent": silent}


def test_the_one_that_does_not_wait_is_named_with_its_node() -> None:
    late, line = summarize_states([said(True, "a"), said(False, "b.py, line 3, in f")], ["n1", "n2"], 27.4, LOGS)
    assert late == 1
    assert line == (
        "the others have waited 27 s for rank 1 on node n2 which is at b.py, line 3, in f. The stacks of all ranks are "
        "in runs/x/logs/rank_N.log"
    )


def test_one_that_says_nothing_by_itself_comes_first() -> None:
    every = [said(False, "b"), said(True, "a"), said(False, "is stopped (SIGSTOP)", stacks=False, silent=True)]
    late, line = summarize_states(every, ["n"] * 3, 5, LOGS)
    assert late == 2 and "for rank 2 on node n which is stopped (SIGSTOP)." in line
    assert line.endswith("rank_N.log, but for rank 2, which could not write its stacks")


def test_a_node_that_says_nothing_comes_before_all() -> None:
    late, line = summarize_states([said(False, "b"), None, None], ["n1", "n2", "n2"], 5, LOGS)
    assert late == 1
    silent = "on node n2 whose node does not respond"
    assert f"rank 1 {silent}; and for rank 2 {silent}" in line


def test_where_all_wait_nobody_is_to_blame() -> None:
    late, line = summarize_states([said(True, "a"), said(True, "b")], ["n", "n"], 5, LOGS)
    assert late is None and line.startswith("all ranks have waited 5 s for each other: rank 0 at a; rank 1 at b. ")


@pytest.mark.parametrize(("patience", "seconds"), [(4, 2), (8, 3), (300, 30), (7200, 60)])
def test_it_is_seen_before_the_time_out(patience: float, seconds: float) -> None:
    assert margin(patience) == seconds


def test_a_thread_stands_where_its_code_does() -> None:
    """Not in a library that it calls, unless there is nothing else."""
    event, clock = threading.Event(), Clock()

    def work() -> None:
        with clock.span("wait", WAIT):
            event.wait()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        place = read_stack_state(thread.ident or 0)
        assert not place.waits and place.where.rpartition(", in ")[2] in ("work", "wait", "span", "_stamp")
    finally:
        event.set()
        thread.join()
    assert read_stack_state(0) == (False, "nowhere")


def test_a_clock_knows_how_far_the_main_thread_has_come() -> None:
    clock = Clock()
    with clock.phase("update", "actor"):
        inside = clock.position
        with clock.span("barrier", WAIT):
            assert clock.position[:2] == ("update", "actor") and clock.position[2] >= inside[2]
            last = clock.position
            other = threading.Thread(target=lambda: clock.span("x").__enter__())
            other.start()
            other.join()
            assert clock.position == last
    assert inside[:2] == ("update", "actor") and clock.position[:2] == ("", "")
