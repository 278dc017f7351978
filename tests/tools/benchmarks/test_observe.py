"""`bench.py observe`: alternation of tracker kinds over steps, and option checks."""

from __future__ import annotations

from pathlib import Path

import bench
import pytest
from benchmarks import observe

from megarl.config import ConfigError

pytestmark = pytest.mark.alone


def test_kinds_alternate_and_skip_the_first_step_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe.AlternatingTracker, "block", 2)
    tracker_kinds = [observe.AlternatingTracker.kind(step) for step in range(1, 11)]
    assert tracker_kinds[::2] == tracker_kinds[1::2] == [*observe.KINDS, "nothing"]
    seconds = {step: float(step) for step in range(1, 17)}
    assert observe.by_step(seconds, "trackers", warm=8) == observe.by_block(seconds, "trackers", warm=8) == [12.0]


def test_trackers_receive_only_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe.AlternatingTracker, "block", 1)
    tracker = observe.AlternatingTracker(tmp_path, ())
    logged_steps: list[int] = []

    class RecordingWorker:
        def log_metrics(self, step: int, values: object, current_step: int) -> None:
            logged_steps.append(step)

        def log_table(self, step: int, rows: object) -> None:
            pass

        def pop_failure(self) -> str:
            return ""

    tracker._workers = [RecordingWorker()]  # type: ignore[list-item]
    for step in range(1, 9):
        tracker.log(step, {"x": 1.0})
    assert logged_steps == [2, 6]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8


def test_rejects_unknown_trackers(tmp_path: Path) -> None:
    (tmp_path / "sft.jsonl").write_text("")
    with pytest.raises(ConfigError, match="--trackers: comet is none of tensorboard"):
        bench.main(["observe", str(tmp_path), "--trackers", "comet"])
