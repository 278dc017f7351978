"""External trackers: each step is delivered once, and failures never stop the run."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from megarl.observe import tracker as module
from megarl.observe.tracker import Tracker, read_metrics
from megarl.observe.trackers import adapter
from megarl.observe.trackers.adapter import (
    MAX_CELL_CHARS,
    MAX_ROLLOUTS,
    Row,
    TrackerRun,
    TrackerState,
    make_rows,
    redact_secrets,
    sanitize_name,
)
from megarl.types import Prompt, Rollout, Turn

pytestmark = pytest.mark.alone


class RecordingAdapter:
    """A tracker adapter that records its calls. fails: number of writes that raise."""

    is_append_only: ClassVar[bool] = True

    def __init__(self, run: TrackerRun, fails: int = 0) -> None:
        self.run, self.fails = run, fails
        self.id = run.id or "run-1"
        self.writes: list[tuple[object, ...]] = []
        self.closed = False
        self.may_continue = threading.Event()
        self.may_continue.set()

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.may_continue.wait(60)
        if self.fails:
            self.fails -= 1
            raise ConnectionError("no way to https://me:hunter22@example.com/x")
        self.writes.append((step, dict(values)))

    def log_text(self, step: int, text: str) -> None:
        self.writes.append((step, text))

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        self.writes.append((step, len(rows)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[RecordingAdapter]:
    """The adapters opened so far, in order."""
    result: list[RecordingAdapter] = []
    monkeypatch.setattr(module, "open_adapter", lambda name, run: result.append(RecordingAdapter(run)) or result[-1])
    return result


def test_writes_arrive_in_order(tmp_path: Path, opened: list[RecordingAdapter]) -> None:
    tracker = Tracker(tmp_path, ["wandb"], config={"run": {"seed": 1}})
    tracker.log(0, {"eval/x": 0.5})
    tracker.log(1, {"x": 1.0})
    tracker.table(1, [("row",)])
    tracker.table(1, [])
    tracker.alarm(1, "look")
    tracker.log(1, {"eval/x": 0.75})
    tracker.close()
    (opened_adapter,) = opened
    assert opened_adapter.writes == [(0, {"eval/x": 0.5}), (1, {"x": 1.0}), (1, 1), (1, "look"), (1, {"eval/x": 0.75})]
    assert (
        opened_adapter.closed
        and opened_adapter.run.first_step == 0
        and opened_adapter.run.config == {"run": {"seed": 1}}
    )


def test_resume_continues_the_same_run_without_repeating_steps(tmp_path: Path, opened: list[RecordingAdapter]) -> None:
    first = Tracker(tmp_path, ["wandb"])
    for step in (1, 2, 3):
        first.log(step, {"x": float(step)})
    first.close()
    second = Tracker(tmp_path, ["wandb"])  # resumed after step 1, with an evaluation
    second.log(1, {"eval/x": 9.0})
    for step in (2, 3):
        second.log(step, {"x": 10.0 * step})
        second.table(step, [("row",)])
    second.log(3, {"x": 30.0, "eval/x": 1.0})
    second.log(4, {"x": 40.0})
    second.close()
    assert opened[1].run.id == "run-1"
    assert opened[1].writes == [(3, 1), (3, {"eval/x": 1.0}), (4, {"x": 40.0})]
    assert read_metrics(tmp_path)[2] == {"x": 20.0}, "metrics.jsonl has the latest values"


def test_late_metrics_are_logged_at_the_current_step(tmp_path: Path, opened: list[RecordingAdapter]) -> None:
    """An evaluation beside training ends later; W&B and others reject earlier steps."""
    tracker = Tracker(tmp_path, ["wandb"])
    tracker.log(3, {"x": 1.0})
    tracker.log(1, {"eval/x": 0.5}, current_step=3)
    tracker.log(4, {"x": 2.0})
    tracker.log(4, {"eval/x": 0.75}, current_step=4)
    tracker.close()
    at_3, later_writes = (3, {"eval/x": 0.5, "eval/after_step": 1.0}), [(4, {"x": 2.0}), (4, {"eval/x": 0.75})]
    assert opened[0].writes == [(3, {"x": 1.0}), at_3, *later_writes]
    assert read_metrics(tmp_path) == {1: {"eval/x": 0.5}, 3: {"x": 1.0}, 4: {"x": 2.0, "eval/x": 0.75}}


def test_truncated_state_file_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "wandb.json"
    for text in ('{"id": "a", "st', "[]", '{"id": "a"}'):
        file.write_text(text)
        assert TrackerState(file).step == -1
    TrackerState(file).save("b", 3, {"x": 1.0})
    assert TrackerState(file).id == "b" and TrackerState(file).filter_new(3, {"x": 1.0, "y": 2.0}) == {"y": 2.0}


def test_failure_is_reported_once_and_the_next_step_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters: list[RecordingAdapter] = []
    monkeypatch.setattr(
        module, "open_adapter", lambda name, run: adapters.append(RecordingAdapter(run, fails=2)) or adapters[-1]
    )
    reported: list[str] = []
    tracker = Tracker(tmp_path, ["mlflow"], reported.append)
    for step in (1, 2, 3):
        tracker.log(step, {"x": 1.0})
    tracker.close()
    assert reported == ["could not write MLflow: no way to https://***@example.com/x; training continues without it"], (
        "without the password"
    )
    assert adapters[0].writes == [(3, {"x": 1.0})]
    assert sorted(read_metrics(tmp_path)) == [1, 2, 3]


def test_gives_up_after_repeated_open_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    def refuse(name: str, run: TrackerRun) -> RecordingAdapter:
        attempts.append(1)
        raise SystemExit("no key")

    monkeypatch.setattr(module, "open_adapter", refuse)
    reported: list[str] = []
    tracker = Tracker(tmp_path, ["swanlab"], reported.append)
    for step in range(10):
        tracker.log(step, {"x": 1.0})
    tracker.close()
    assert len(attempts) == adapter.MAX_FAILURES and reported == [
        "could not write SwanLab: no key; training continues without it"
    ]


def test_hanging_tracker_does_not_block_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "CLOSE_TIMEOUT_S", 0.05)
    release = threading.Event()

    def hang(name: str, run: TrackerRun) -> RecordingAdapter:
        release.wait(60)
        return RecordingAdapter(run)

    monkeypatch.setattr(module, "open_adapter", hang)
    reported: list[str] = []
    tracker = Tracker(tmp_path, ["wandb"], reported.append)
    for step in range(adapter.QUEUE_SIZE + 10):
        tracker.log(step, {"x": 1.0})
    assert len(reported) == 1 and "writes are pending; further ones are dropped" in reported[0]
    tracker.close()
    release.set()
    assert len(reported) == 1


def test_sanitizes_metric_names() -> None:
    assert sanitize_name("rollout/reward_mean/gsm8k") == "rollout/reward_mean/gsm8k"
    assert sanitize_name("/a//b|c:d/../e\n") == "_/a/_/b_c_d/_/e_"
    assert len(sanitize_name("x" * 999)) == 250


def test_redacts_secrets_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert redact_secrets(ValueError("bad key 0123456789abcdef\nof you")) == "bad key *** of you"


def test_table_has_the_first_rollout_of_each_prompt() -> None:
    turns = (Turn((1,)), Turn((2,), (-0.5,), is_action=True))
    rollouts = [
        Rollout(
            Prompt(f"p{number // 2}", ({"role": "user", "content": "q" * 2000},)),
            turns,
            reward=0.5,
            group=number // 2,
            messages=({"role": "assistant", "content": f"a{number}"},),
        )
        for number in range(20)
    ]
    rows = make_rows(7, rollouts)
    assert len(rows) == MAX_ROLLOUTS and [row[2] for row in rows] == ["a0", "a2", "a4", "a6"]
    assert rows[0][0] == 7 and rows[0][3:] == (0.5, 2, "stop") and len(rows[0][1]) == MAX_CELL_CHARS + 4
    assert make_rows(7, []) == []
