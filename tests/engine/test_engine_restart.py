"""`EngineRestart`: a lost engine restarts once for each loss, and each error is reported once."""

from __future__ import annotations

import threading
from typing import Any

from megarl.engine.engine_protocol import EngineError, EngineLost
from megarl.engine.engine_restart import EngineRestart


class FakeEngine:
    """An engine. starts: the error of each start, or an empty string."""

    def __init__(self, *starts: str, nnodes: int = 1) -> None:
        self.outcomes, self.nnodes, self.start_number = list(starts), nnodes, 1
        self.calls: list[str] = []
        self.is_running, self.may_start = True, threading.Event()
        self.may_start.set()

    def restart(self) -> None:
        self.calls.append("restart")
        self.start_number += 1

    def wait_ready(self) -> None:
        self.may_start.wait(30)
        if error := self.outcomes.pop(0):
            raise EngineError(error)
        self.is_running = True

    def check_running(self) -> None:
        if not self.is_running:
            raise EngineLost("died", "engine 0 is not running")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def make_restart(engine: Any) -> EngineRestart:
    return EngineRestart(engine)


def test_repeated_loss_reports_start_one_background_restart() -> None:
    engine = FakeEngine("")
    engine.may_start.clear()
    restart = make_restart(engine)
    for fault in ("hangs", "died"):
        restart.report_lost(EngineLost(fault, fault))  # type: ignore[arg-type]
    restart.ensure_started()  # as on ranks that learn of the loss
    assert restart.is_pending
    assert [str(restart.pop_error()), restart.pop_error()] == ["hangs", None]
    engine.may_start.set()
    assert restart.wait() > 0 and not restart.is_pending and restart.pop_error() is None
    assert restart.wait() == 0.0  # it was not lost
    assert engine.calls == ["restart"]
    restart.close()
    assert engine.calls[-1] == "shutdown"


def test_late_loss_report_does_not_restart_a_restarted_engine() -> None:
    engine = FakeEngine("", "")
    restart = make_restart(engine)
    errors = []
    for start in (1, 1, 2):
        restart.report_lost(EngineLost("died", f"start {start}", start_number=start))
        restart.wait()
        errors.append(str(restart.pop_error()))
    assert engine.calls == ["restart"] * 2 and errors == ["start 1", "None", "start 2"]
    restart.close()


def test_failed_restart_is_reported_and_retried() -> None:
    engine = FakeEngine("no memory", "")
    restart = make_restart(engine)
    engine.is_running = False
    restart.check()
    assert (result := restart.pop_error()) is not None and result.fault == "died"
    restart.wait()
    assert (result := restart.pop_error()) is not None and (result.fault, str(result)) == (
        "did not start again",
        "no memory",
    )
    restart.ensure_started()
    restart.wait()
    assert restart.pop_error() is None and engine.calls == ["restart"] * 2
    restart.check()
    assert restart.pop_error() is None
    restart.close()


def test_failed_request_is_a_loss_only_if_the_engine_died() -> None:
    engine = FakeEngine("")
    restart = make_restart(engine)
    assert not restart.restart_if_lost(EngineError("engine 0 refused /flush_cache"))
    assert restart.pop_error() is None and engine.calls == []
    engine.is_running = False  # its server answered and died a moment later
    assert restart.restart_if_lost(EngineError("engine 0 refused /flush_cache"))
    assert (result := restart.pop_error()) is not None and result.fault == "died"
    restart.close()


def test_multi_node_engine_restarts_only_when_all_ranks_know() -> None:
    engine = FakeEngine("", nnodes=2)
    restart = make_restart(engine)
    restart.report_lost(EngineLost("died", ""))
    assert engine.calls == [] and not restart.is_pending
    restart.ensure_started()
    restart.wait()
    assert engine.calls == ["restart"]
    restart.close()
