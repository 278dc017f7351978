"""An engine that is lost is started again at once, once for each loss, and what comes of it is told once."""

from __future__ import annotations

import threading
from typing import Any

from megarl.engine.engine_protocol import EngineError, EngineLost
from megarl.engine.sglang_engine import EngineRestart


class Played:
    """An engine. starts: what comes of each start, an error or None."""

    def __init__(self, *starts: str, nnodes: int = 1) -> None:
        self.outcomes, self.nnodes, self.start_number = list(starts), nnodes, 1
        self.calls: list[str] = []
        self.runs, self.may_start = True, threading.Event()
        self.may_start.set()

    def restart(self) -> None:
        self.calls.append("restart")
        self.start_number += 1

    def wait_ready(self) -> None:
        self.may_start.wait(30)
        if error := self.outcomes.pop(0):
            raise EngineError(error)
        self.runs = True

    def check_running(self) -> None:
        if not self.runs:
            raise EngineLost("died", "engine 0 is not running")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def revival(engine: Any) -> EngineRestart:
    return EngineRestart(engine)


def test_it_is_started_in_the_background_once_however_often_it_is_said_to_be_lost() -> None:
    engine = Played("")
    engine.may_start.clear()
    own = revival(engine)
    for fault in ("hangs", "died"):
        own.report_lost(EngineLost(fault, fault))  # type: ignore[arg-type]
    own.ensure_started()  # others have been told
    assert own.is_pending
    assert [str(own.pop_error()), own.pop_error()] == ["hangs", None]
    engine.may_start.set()
    assert own.wait() > 0 and not own.is_pending and own.pop_error() is None
    assert own.wait() == 0.0  # it was not away
    assert engine.calls == ["restart"]
    own.close()
    assert engine.calls[-1] == "shutdown"


def test_who_hears_late_of_a_loss_does_not_lose_the_engine_that_is_there_again() -> None:
    engine = Played("", "")
    own = revival(engine)
    told = []
    for start in (1, 1, 2):
        own.report_lost(EngineLost("died", f"start {start}", start_number=start))
        own.wait()
        told.append(str(own.pop_error()))
    assert engine.calls == ["restart"] * 2 and told == ["start 1", "None", "start 2"]
    own.close()


def test_one_that_does_not_start_is_lost_again() -> None:
    engine = Played("no memory", "")
    own = revival(engine)
    engine.runs = False
    own.check()
    assert (found := own.pop_error()) is not None and found.fault == "died"
    own.wait()
    assert (found := own.pop_error()) is not None and (found.fault, str(found)) == ("did not start again", "no memory")
    own.ensure_started()
    own.wait()
    assert own.pop_error() is None and engine.calls == ["restart"] * 2
    own.check()
    assert own.pop_error() is None
    own.close()


def test_what_fails_is_lost_only_where_it_is_gone() -> None:
    engine = Played("")
    own = revival(engine)
    assert not own.restart_if_lost(EngineError("engine 0 refused /flush_cache"))
    assert own.pop_error() is None and engine.calls == []
    engine.runs = False  # its server answered, and is seen dead a moment later
    assert own.restart_if_lost(EngineError("engine 0 refused /flush_cache"))
    assert (found := own.pop_error()) is not None and found.fault == "died"
    own.close()


def test_one_on_several_machines_waits_until_all_know() -> None:
    engine = Played("", nnodes=2)
    own = revival(engine)
    own.report_lost(EngineLost("died", ""))
    assert engine.calls == [] and not own.is_pending
    own.ensure_started()
    own.wait()
    assert engine.calls == ["restart"]
    own.close()
