"""Pauses of the garbage collector."""

from __future__ import annotations

import gc
import threading

import pytest

from megarl.utils.garbage_collection import pause_gc

pytestmark = pytest.mark.alone


def test_last_of_overlapping_pauses_enables() -> None:
    assert gc.isenabled()
    started, may_end = threading.Event(), threading.Event()

    def pause() -> None:
        with pause_gc():
            started.set()
            may_end.wait(30)

    thread = threading.Thread(target=pause)
    with pause_gc():
        thread.start()
        assert started.wait(30) and not gc.isenabled()
    assert not gc.isenabled()
    may_end.set()
    thread.join()
    assert gc.isenabled()


def test_stays_disabled_if_it_was() -> None:
    gc.disable()
    try:
        with pytest.raises(ValueError), pause_gc():
            raise ValueError
        assert not gc.isenabled()
    finally:
        gc.enable()
