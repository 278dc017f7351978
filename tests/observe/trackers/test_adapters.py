"""Tracker adapters against the installed packages, offline."""

from __future__ import annotations

import json
import math
import resource
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, from_dict
from megarl.observe.tracker import TRACKERS, Tracker, check_trackers, open_adapter
from megarl.observe.trackers.adapter import TrackerRun

pytestmark = pytest.mark.alone

KEY = "0123456789abcdef0123456789abcdef01234567"
ROW = (1, "two and two?", "<script>alert(1)</script> | 4", 1.0, 12, "stop")
FIGURES = {"rollout/reward_mean": 0.5, "actor/grad_norm": math.nan, "x|odd/../name": math.inf, "loss": -math.inf}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No account, no network."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_API_KEY", KEY)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def log_run(folder: Path, name: str, first: int = 1, last: int = 2) -> None:
    """Log steps of a run without warnings, and check that no API key is in its folder."""
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="could not write")
        tracker = Tracker(folder, [name], config={"run": {"dir": "a", "seed": 1}})
        for step in range(first, last + 1):
            tracker.log(step, FIGURES)
            tracker.table(step, [ROW])
        tracker.alarm(last, "actor/entropy is low")
        tracker.close()
    for file in folder.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


def test_rejects_trackers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(["tensorboard"])
    with pytest.raises(ConfigError, match="track.trackers: tensorboard is named twice"):
        check_trackers(["tensorboard", "tensorboard"])
    monkeypatch.setitem(TRACKERS, "no_package", TRACKERS["wandb"]._replace(package="no_package"))
    with pytest.raises(ConfigError, match="track.trackers: no_package is not installed; run `pip install wandb`"):
        check_trackers(["tensorboard", "no_package"])
    with pytest.raises(ConfigError, match="did you mean wandb"):
        from_dict({"track": {"trackers": ["wandbb"]}})


def test_config_accepts_all_trackers() -> None:
    assert set(from_dict({"track": {"trackers": list(TRACKERS)}}).track.trackers) == set(TRACKERS)


def test_tensorboard_escapes_generated_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_run(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (_, event) = events.Tensors("rollouts/text_summary")
    (text,) = event.tensor_proto.string_val
    assert b"<script" not in text and b"&lt;script" in text and b"&#124; 4" in text
    assert [scalar.value for scalar in events.Scalars("rollout/reward_mean")] == [0.5, 0.5]


def test_tensorboard_recovers_from_a_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file size limit stands in for the full disk; the first write beyond it is partial."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    figures = {f"figure_{number}": 0.5 for number in range(50)}
    sink = open_adapter("tensorboard", TrackerRun(tmp_path, first_step=1))
    sink.log_metrics(1, figures)
    (file,) = (tmp_path / "tensorboard").iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, limits[1]))
    try:
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                sink.log_metrics(step, figures)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    sink.log_metrics(4, figures)
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("figure_49")] == [1, 4]
    assert "Traceback" not in capfd.readouterr().err, "no exception in a background thread"


def test_wandb_resumes_offline(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    folder = tmp_path / "run"
    log_run(folder, "wandb")
    log_run(folder, "wandb", first=2, last=3)  # step 2 is repeated
    wandb.teardown()  # as at the exit of the process: `finish` does not wait until W&B's process has written the file
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(runs) == 2 and len({next(run.glob("*.wandb")).name for run in runs}) == 1, "of one run"
    result = [read_history(run) for run in runs]
    assert [[line["_step"] for line in lines] for lines in result] == [[1, 2], [2, 3]]
    assert result[0][0]["rollout/reward_mean"] == 0.5
    assert any(name.startswith("rollouts/") for name in result[0][0])
    assert "rollout/reward_mean" not in result[1][0] and result[1][1]["rollout/reward_mean"] == 0.5


def read_history(run: Path) -> list[dict[str, Any]]:
    """Return the metrics that `wandb sync` would send, one dict per step."""
    from wandb.proto import wandb_internal_pb2

    lines = []
    for data in read_records(next(run.glob("*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            lines.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return lines


def read_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log: after a 7-byte header, 32 KiB blocks of record fragments."""
    position, payload = 7, b""
    while position + 7 <= len(log):
        if (block_left := 32768 - position % 32768) < 7:
            position += block_left
            continue
        _, length, kind = struct.unpack("<IHB", log[position : position + 7])
        payload, position = payload + log[position + 7 : position + 7 + length], position + 7 + length
        if kind in (1, 4):  # a complete record, or its last fragment
            yield payload
            payload = b""


def test_wandb_without_a_key_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    warned: list[str] = []
    tracker = Tracker(tmp_path, ["wandb"], warned.append)
    tracker.log(1, FIGURES)
    tracker.close()
    (text,) = warned
    assert "W&B: no API key: export WANDB_API_KEY, or WANDB_MODE=offline" in text


def test_mlflow_writes_to_the_run_folder(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    log_run(folder, "mlflow")
    log_run(folder, "mlflow", first=2, last=3)
    client = mlflow.MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("megarl").experiment_id])
    assert run.data.params == {"run.dir": "a", "run.seed": "1"}
    steps = [element.step for element in client.get_metric_history(run.info.run_id, "rollout/reward_mean")]
    assert steps == [1, 2, 3], "one run, no step twice"
    assert run.data.metrics.keys() == {"rollout/reward_mean", "actor/grad_norm", "x_odd/_/name", "loss"}
    files = [path.name for path in (folder / "mlflow").rglob("step_*.json")]
    assert sorted(files) == ["step_000001.json", "step_000002.json", "step_000003.json"]


def test_swanlab_writes_offline(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    folder = tmp_path / "run"
    log_run(folder, "swanlab")
    log_run(folder, "swanlab", first=2, last=3)
    assert list((folder / "swanlab").rglob("*.swanlab"))
