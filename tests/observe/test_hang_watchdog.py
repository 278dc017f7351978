"""Messages of the hang watchdog; `test_hanging_ranks.py` tests the detection."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.clock import WAIT, Clock
from megarl.observe.hang_watchdog import margin, read_stack_state, summarize_states

pytestmark = pytest.mark.alone

LOGS = Path("runs/x/logs")


def rank_state(waits: bool, location: str, stacks: bool = True, silent: bool = False) -> dict[str, Any]:
    return {"waits": waits, "where": location, "stacks": stacks, "silent": silent}


def test_names_the_rank_that_is_not_waiting_and_its_node() -> None:
    hung, line = summarize_states(
        [rank_state(True, "a"), rank_state(False, "b.py, line 3, in f")], ["n1", "n2"], 27.4, LOGS
    )
    assert hung == 1
    assert line == (
        "the others have waited 27 s for rank 1 on node n2 which is at b.py, line 3, in f. The stacks of all ranks are "
        "in runs/x/logs/rank_N.log"
    )


def test_silent_rank_is_named_first() -> None:
    states = [
        rank_state(False, "b"),
        rank_state(True, "a"),
        rank_state(False, "is stopped (SIGSTOP)", stacks=False, silent=True),
    ]
    hung, line = summarize_states(states, ["n"] * 3, 5, LOGS)
    assert hung == 2 and "for rank 2 on node n which is stopped (SIGSTOP)." in line
    assert line.endswith("rank_N.log, but for rank 2, which could not write its stacks")


def test_unresponsive_node_is_named_before_ranks() -> None:
    hung, line = summarize_states([rank_state(False, "b"), None, None], ["n1", "n2", "n2"], 5, LOGS)
    assert hung == 1
    silent = "on node n2 whose node does not respond"
    assert f"rank 1 {silent}; and for rank 2 {silent}" in line


def test_blames_no_rank_if_all_wait() -> None:
    hung, line = summarize_states([rank_state(True, "a"), rank_state(True, "b")], ["n", "n"], 5, LOGS)
    assert hung is None and line.startswith("all ranks have waited 5 s for each other: rank 0 at a; rank 1 at b. ")


@pytest.mark.parametrize(("patience", "seconds"), [(4, 2), (8, 3), (300, 30), (7200, 60)])
def test_margin_before_the_timeout(patience: float, seconds: float) -> None:
    assert margin(patience) == seconds


def test_reads_the_stack_state_of_a_thread() -> None:
    """Prefers frames of MegaRL over those of libraries that it calls."""
    event, clock = threading.Event(), Clock()

    def work() -> None:
        with clock.span("wait", WAIT):
            event.wait()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        state = read_stack_state(thread.ident or 0)
        assert not state.waits and state.where.rpartition(", in ")[2] in ("work", "wait", "span", "_stamp")
    finally:
        event.set()
        thread.join()
    assert read_stack_state(0) == (False, "nowhere")


def test_clock_tracks_progress_of_the_main_thread() -> None:
    clock = Clock()
    with clock.phase("update", "actor"):
        position = clock.position
        with clock.span("barrier", WAIT):
            assert clock.position[:2] == ("update", "actor") and clock.position[2] >= position[2]
            last = clock.position
            other_thread = threading.Thread(target=lambda: clock.span("x").__enter__())
            other_thread.start()
            other_thread.join()
            assert clock.position == last
    assert position[:2] == ("update", "actor") and clock.position[:2] == ("", "")


def test_collects_no_garbage_while_reading_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.7 holds a lock of all threads during `sys._current_frames`; a finalizer that needs it would hang."""
    collections: list[str] = []
    is_inside, current_frames = False, sys._current_frames

    def read_frames() -> dict[int, Any]:
        nonlocal is_inside
        is_inside = True
        kept = [current_frames() for _ in range(100)]
        is_inside = False
        return kept[0]

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if is_inside:
            collections.append(phase)

    monkeypatch.setattr(sys, "_current_frames", read_frames)
    may_end = threading.Event()
    threads = [threading.Thread(target=may_end.wait, args=(60,)) for _ in range(20)]
    thresholds = gc.get_threshold()
    for thread in threads:
        thread.start()
    gc.callbacks.append(on_collection)
    gc.set_threshold(1)
    try:
        read_frames()
        assert collections
        collections.clear()
        read_stack_state(threading.get_ident())
        assert not collections
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(on_collection)
        may_end.set()
        for thread in threads:
            thread.join()
