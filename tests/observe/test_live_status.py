"""Status of a rank for the live page."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megarl.engine.engine_protocol import EngineLoad
from megarl.observe import live_status
from megarl.observe.live_status import HEARTBEAT_S, LiveStatus
from megarl.rollout import request_gate
from megarl.view.run_data import read_statuses

pytestmark = pytest.mark.alone


def test_status_is_written_while_the_rank_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_status, "MIN_INTERVAL_S", 0.01)
    status = LiveStatus(tmp_path, 3, 8, lambda: ("actor_update", "actor"), lambda: 7)
    listener = request_gate._load_listener
    assert listener is not None
    listener(EngineLoad(5, 2, 0.25), 9)
    status.start()
    file = tmp_path / "live" / "rank_00003.json"
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (result,) = read_statuses(tmp_path)
    assert result.pop("seconds") < 60
    assert result == {
        **{"rank": 3, "step": 7, "phase": "actor_update", "category": "actor"},
        **{"running": 5, "waiting": 2, "conversations": 9, "cache_usage": 0.25},
    }
    status.close()
    assert not (tmp_path / "live").exists() and request_gate._load_listener is None


def test_ranks_that_have_ended_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    status = {"rank": 0, "step": 1, "phase": "generate", "category": "rank", "since": 100.0, "time": 105.0}
    (tmp_path / "live/rank_00000.json").write_text(json.dumps(status))
    (tmp_path / "live/rank_00001.json").write_text("[")
    (tmp_path / "live/rank_00002.json").write_text(json.dumps({"rank": 2}))
    (result,) = read_statuses(tmp_path, now=110.0)
    assert result == {"rank": 0, "step": 1, "phase": "generate", "category": "rank", "seconds": 10.0}
    assert read_statuses(tmp_path, now=106.0 + 3 * HEARTBEAT_S) == []


def test_old_load_is_dropped_and_phase_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phase = ["generate"]
    status = LiveStatus(tmp_path, 0, 1, lambda: (phase[0], "rank"), lambda: 1)
    now = time.time()
    status.set_load(EngineLoad(1, 0, 0.5), 1)
    monkeypatch.setattr(time, "time", lambda: now + 100)
    before = status.read()
    phase[0] = "update"
    monkeypatch.setattr(time, "time", lambda: now + 200)
    after = status.read()
    assert "running" not in before
    assert (before["since"], after["since"]) == pytest.approx((now + 100, now + 200), abs=0.1)
    request_gate.set_load_listener(None)
