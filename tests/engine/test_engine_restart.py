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
    local = revival(engine)
    for fault in ("hangs", "died"):
        local.report_lost(EngineLost(fault, fault))  # type: ignore[arg-type]
    local.ensure_started()  # others have been told
    assert local.is_pending
    assert [str(local.pop_error()), local.pop_error()] == ["hangs", None]
    engine.may_start.set()
    assert local.wait() > 0 and not local.is_pending and local.pop_error() is None
    assert local.wait() == 0.0  # it was not away
    assert engine.calls == ["restart"]
    local.close()
    assert engine.calls[-1] == "shutdown"


def test_who_hears_late_of_a_loss_does_not_lose_the_engine_that_is_there_again() -> None:
    engine = Played("", "")
    local = revival(engine)
    events = []
    for start in (1, 1, 2):
        local.report_lost(EngineLost("died", f"start {start}", start_number=start))
        local.wait()
        events.append(str(local.pop_error()))
    assert engine.calls == ["restart"] * 2 and events == ["start 1", "None", "start 2"]
    local.close()


def test_one_that_does_not_start_is_lost_again() -> None:
    engine = Played("no memory", "")
    local = revival(engine)
    engine.runs = False
    local.check()
    assert (result := local.pop_error()) is not None and result.fault == "died"
    local.wait()
    assert (result := local.pop_error()) is not None and (result.fault, str(result)) == (
        "did not start again",
        "no memory",
    )
    local.ensure_started()
    local.wait()
    assert local.pop_error() is None and engine.calls == ["restart"] * 2
    local.check()
    assert local.pop_error() is None
    local.close()


def test_what_fails_is_lost_only_where_it_is_gone() -> None:
    engine = Played("")
    local = revival(engine)
    assert not local.restart_if_lost(EngineError("engine 0 refused /flush_cache"))
    assert local.pop_error() is None and engine.calls == []
    engine.runs = False  # its server answered, and is seen dead a moment later
    assert local.restart_if_lost(EngineError("engine 0 refused /flush_cache"))
    assert (result := local.pop_error()) is not None and result.fault == "died"
    local.close()


def test_one_on_several_machines_waits_until_all_know() -> None:
    engine = Played("", nnodes=2)
    local = revival(engine)
    local.report_lost(EngineLost("died", ""))
    assert engine.calls == [] and not local.is_pending
    local.ensure_started()
    local.wait()
    assert engine.calls == ["restart"]
    local.close()
