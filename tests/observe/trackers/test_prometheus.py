"""The Prometheus adapter, read over HTTP by the parser of the Prometheus client."""

from __future__ import annotations

import json
import math
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megarl.observe.tracker import Tracker
from megarl.observe.trackers.prometheus import sanitize_metric


@pytest.fixture(autouse=True)
def any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_PROMETHEUS_PORT", "0")
    monkeypatch.delenv("MEGARL_PROMETHEUS_ADDRESS", raising=False)


@contextmanager
def open_tracker(folder: Path) -> Iterator[Tracker]:
    """Yield a tracker that has logged a step, and whose server has answered since."""
    folder.mkdir()
    tracker = Tracker(folder, ["prometheus"])
    tracker.log(3, {"rollout/reward_mean": 0.25, "actor/grad_norm": math.nan})
    yield tracker
    tracker.close()


def read(folder: Path) -> dict[str, float]:
    """Return the value of each metric, all of which are labeled with the run, from the address in prometheus.json."""
    for _ in range(500):
        if (folder / "prometheus.json").is_file():
            break
        time.sleep(0.02)
    ((target,), labels) = json.loads((folder / "prometheus.json").read_text())[0].values()
    assert labels == {"run": folder.name} and target.startswith("127.0.0.1:")
    text = urllib.request.urlopen(f"http://{target}/metrics", timeout=10).read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels == {"run": folder.name} for sample in samples)
    return {sample.name: sample.value for sample in samples}


def read_until(folder: Path, name: str, value: float) -> dict[str, float]:
    for _ in range(500):
        values = read(folder)
        if values.get(name) == value:
            return values
        time.sleep(0.02)
    raise AssertionError(f"{name} did not become {value}: {values}")


def test_serves_the_newest_values(tmp_path: Path) -> None:
    with open_tracker(tmp_path / "run") as tracker:
        values = read_until(tmp_path / "run", "megarl_step", 3)
        assert values["megarl_rollout_reward_mean"] == 0.25 and math.isnan(values["megarl_actor_grad_norm"])
        assert values["megarl_alarms_total"] == 0 and values["megarl_step_time_seconds"] > 1.7e9
        tracker.log(4, {"rollout/reward_mean": 0.5})
        tracker.alarm(4, "actor/entropy is low")
        values = read_until(tmp_path / "run", "megarl_alarms_total", 1)
        assert (values["megarl_step"], values["megarl_rollout_reward_mean"]) == (4, 0.5)
    assert not (tmp_path / "run" / "prometheus.json").exists(), "a server would find a run that has ended"


def test_second_run_on_the_port_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tracker(tmp_path / "first"):
        read(tmp_path / "first")
        port = json.loads((tmp_path / "first" / "prometheus.json").read_text())[0]["targets"][0].rpartition(":")[2]
        monkeypatch.setenv("MEGARL_PROMETHEUS_PORT", port)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with open_tracker(tmp_path / "second"):
                pass
        (warning,) = caught
        assert f"127.0.0.1:{port}: Address already in use; set MEGARL_PROMETHEUS_PORT to a free port" in str(
            warning.message
        )


@pytest.mark.parametrize("port", ["http", "70000", "-1"])
def test_invalid_port_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("MEGARL_PROMETHEUS_PORT", port)
    with pytest.warns(UserWarning, match=f"must be a port, 0 to 65535, not '{port}'"), open_tracker(tmp_path / "run"):
        pass


def test_names() -> None:
    assert sanitize_metric("time/generate") == "megarl_time_generate"
    assert sanitize_metric("eval/x|é-1") == "megarl_eval_x___1"
