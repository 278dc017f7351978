"""A tracker of somebody else's never stops a run, whatever it does; and is given each step once."""

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


class Played:
    """Notes what it is given. fails: of how many writings."""

    is_append_only: ClassVar[bool] = True

    def __init__(self, events: TrackerRun, fails: int = 0) -> None:
        self.told, self.fails = events, fails
        self.id = events.id or "run-1"
        self.given: list[tuple[object, ...]] = []
        self.closed = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.may_go_on.wait(60)
        if self.fails:
            self.fails -= 1
            raise ConnectionError("no way to https://me:hunter22@example.com/x")
        self.given.append((step, dict(values)))

    def log_text(self, step: int, text: str) -> None:
        self.given.append((step, text))

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        self.given.append((step, len(rows)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Played]:
    """What was opened, one after the other."""
    result: list[Played] = []
    monkeypatch.setattr(module, "open_adapter", lambda name, events: result.append(Played(events)) or result[-1])
    return result


def test_it_is_told_everything_in_order(tmp_path: Path, made: list[Played]) -> None:
    tracker = Tracker(tmp_path, ["wandb"], config={"run": {"seed": 1}})
    tracker.log(0, {"eval/x": 0.5})
    tracker.log(1, {"x": 1.0})
    tracker.table(1, [("row",)])
    tracker.table(1, [])
    tracker.alarm(1, "look")
    tracker.log(1, {"eval/x": 0.75})
    tracker.close()
    (sink,) = made
    assert sink.given == [(0, {"eval/x": 0.5}), (1, {"x": 1.0}), (1, 1), (1, "look"), (1, {"eval/x": 0.75})]
    assert sink.closed and sink.told.first_step == 0 and sink.told.config == {"run": {"seed": 1}}


def test_a_resumed_run_goes_on_in_the_same_run_and_gives_no_step_twice(tmp_path: Path, made: list[Played]) -> None:
    first = Tracker(tmp_path, ["wandb"])
    for step in (1, 2, 3):
        first.log(step, {"x": float(step)})
    first.close()
    second = Tracker(tmp_path, ["wandb"])  # from the checkpoint after step 1, with an evaluation of it
    second.log(1, {"eval/x": 9.0})
    for step in (2, 3):
        second.log(step, {"x": 10.0 * step})
        second.table(step, [("row",)])
    second.log(3, {"x": 30.0, "eval/x": 1.0})
    second.log(4, {"x": 40.0})
    second.close()
    assert made[1].told.id == "run-1"
    assert made[1].given == [(3, 1), (3, {"eval/x": 1.0}), (4, {"x": 40.0})]
    assert read_metrics(tmp_path)[2] == {"x": 20.0}, "the run's own file has what was done last"


def test_figures_of_an_earlier_step_come_at_the_one_under_way(tmp_path: Path, made: list[Played]) -> None:
    """An evaluation beside training is over later: W&B and others refuse a step before the last one."""
    tracker = Tracker(tmp_path, ["wandb"])
    tracker.log(3, {"x": 1.0})
    tracker.log(1, {"eval/x": 0.5}, current_step=3)
    tracker.log(4, {"x": 2.0})
    tracker.log(4, {"eval/x": 0.75}, current_step=4)
    tracker.close()
    at_3, later = (3, {"eval/x": 0.5, "eval/after_step": 1.0}), [(4, {"x": 2.0}), (4, {"eval/x": 0.75})]
    assert made[0].given == [(3, {"x": 1.0}), at_3, *later]
    assert read_metrics(tmp_path) == {1: {"eval/x": 0.5}, 3: {"x": 1.0}, 4: {"x": 2.0, "eval/x": 0.75}}


def test_a_standing_that_was_cut_short_is_none(tmp_path: Path) -> None:
    file = tmp_path / "wandb.json"
    for text in ('{"id": "a", "st', "[]", '{"id": "a"}'):
        file.write_text(text)
        assert TrackerState(file).step == -1
    TrackerState(file).save("b", 3, {"x": 1.0})
    assert TrackerState(file).id == "b" and TrackerState(file).filter_new(3, {"x": 1.0, "y": 2.0}) == {"y": 2.0}


def test_a_failure_is_said_once_and_the_next_step_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks: list[Played] = []
    monkeypatch.setattr(module, "open_adapter", lambda name, events: sinks.append(Played(events, fails=2)) or sinks[-1])
    said: list[str] = []
    tracker = Tracker(tmp_path, ["mlflow"], said.append)
    for step in (1, 2, 3):
        tracker.log(step, {"x": 1.0})
    tracker.close()
    assert said == ["could not write MLflow: no way to https://***@example.com/x; training continues without it"], (
        "and without the password"
    )
    assert sinks[0].given == [(3, {"x": 1.0})]
    assert sorted(read_metrics(tmp_path)) == [1, 2, 3]


def test_one_that_never_opens_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuses(name: str, events: TrackerRun) -> Played:
        tried.append(1)
        raise SystemExit("no key")

    monkeypatch.setattr(module, "open_adapter", refuses)
    said: list[str] = []
    tracker = Tracker(tmp_path, ["swanlab"], said.append)
    for step in range(10):
        tracker.log(step, {"x": 1.0})
    tracker.close()
    assert len(tried) == adapter.MAX_FAILURES and said == [
        "could not write SwanLab: no key; training continues without it"
    ]


def test_a_step_does_not_wait_for_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "CLOSE_TIMEOUT_S", 0.05)
    hung = threading.Event()

    def hangs(name: str, events: TrackerRun) -> Played:
        hung.wait(60)
        return Played(events)

    monkeypatch.setattr(module, "open_adapter", hangs)
    said: list[str] = []
    tracker = Tracker(tmp_path, ["wandb"], said.append)
    for step in range(adapter.QUEUE_SIZE + 10):
        tracker.log(step, {"x": 1.0})
    assert len(said) == 1 and "writes are pending; further ones are dropped" in said[0]
    tracker.close()
    hung.set()
    assert len(said) == 1


def test_names_that_a_tracker_takes() -> None:
    assert sanitize_name("rollout/reward_mean/gsm8k") == "rollout/reward_mean/gsm8k"
    assert sanitize_name("/a//b|c:d/../e\n") == "_/a/_/b_c_d/_/e_"
    assert len(sanitize_name("x" * 999)) == 250


def test_no_secret_is_in_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert redact_secrets(ValueError("bad key 0123456789abcdef\nof you")) == "bad key *** of you"


def test_a_table_has_the_first_answer_of_a_few_prompts() -> None:
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
