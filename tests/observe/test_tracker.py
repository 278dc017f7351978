"""`Tracker`: metrics.jsonl and TensorBoard, across resumes and full disks."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest

from megarl.observe.tracker import Tracker, read_metrics

pytestmark = pytest.mark.alone


def test_file_and_tensorboard_agree(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Tracker(tmp_path)
    tracker.log(0, {"eval/reward_greedy": 0.0})
    tracker.log(1, {"rollout/reward_mean": 0.25, "time/step": 2.0})
    tracker.log(2, {"rollout/reward_mean": 0.5, "time/step": math.nan})
    tracker.close()
    metrics = read_metrics(tmp_path)
    assert metrics[0] == {"eval/reward_greedy": 0.0} and metrics[1] == {"rollout/reward_mean": 0.25, "time/step": 2.0}
    assert math.isnan(metrics[2]["time/step"])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("rollout/reward_mean")]
    assert scalars == [(1, 0.25), (2, 0.5)]


def test_resume_discards_metrics_of_repeated_steps(tmp_path: Path) -> None:
    first = Tracker(tmp_path, names=())
    for step in range(1, 5):
        first.log(step, {"x": float(step)})
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 5, "x"')  # crashed in the middle of a line
    second = Tracker(tmp_path, names=())
    second.log(2, {"eval/reward_greedy": 0.5})
    second.log(3, {"x": 30.0})
    assert read_metrics(tmp_path) == {1: {"x": 1.0}, 2: {"x": 2.0, "eval/reward_greedy": 0.5}, 3: {"x": 30.0}}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 2, 3]
    third = Tracker(tmp_path, names=())
    third.log(2, {"x": 20.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 2], "the repeated step appears once"
    assert read_metrics(tmp_path) == {1: {"x": 1.0}, 2: {"x": 20.0, "eval/reward_greedy": 0.5}}


def test_full_disk_warns_once(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    (tmp_path / "tensorboard").write_text("in the way of the folder")
    tracker = Tracker(tmp_path)
    with pytest.warns(UserWarning) as error:
        tracker.log(1, {"x": 1.0})
        tracker.log(2, {"x": 2.0})
        tracker.close()  # TensorBoard writes in the background and warns with a later step or at the end
    texts = [str(warning.message) for warning in error]
    assert sum("metrics.jsonl" in text and "No space left" in text for text in texts) == 1
    assert sum("TensorBoard" in text for text in texts) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.log(3, {"x": 3.0})
        tracker.close()
