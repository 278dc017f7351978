"""Calls that the adapters make, checked on fakes with the signatures of the real packages."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.tracker import Tracker

sys.path.append(str(Path(__file__).resolve().parent))

from fake_packages import PARAMETERS, SETTINGS, FakePackage  # noqa: E402

pytestmark = pytest.mark.alone

ROW = (1, "two and two?", "4", 1.0, 12, "stop")
FIGURES = {"rollout/reward_mean": 0.5, "x|odd/../name": 1.5}


@pytest.fixture
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePackage:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME", "SWANLAB_MODE", "SWANLAB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    package = FakePackage(request.param)
    for name, module in package.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return package


def log_run(folder: Path, package: FakePackage, first: int, last: int) -> list[str]:
    """Log steps of a run; return the warnings."""
    warned: list[str] = []
    tracker = Tracker(folder, [package.package], warned.append, config={"run": {"seed": 1}})
    for step in range(first, last + 1):
        tracker.log(step, FIGURES)
    tracker.table(last, [ROW])
    tracker.alarm(last, "actor/entropy is low")
    tracker.close()
    return warned


@pytest.mark.parametrize("package", ["wandb"], indirect=True)
def test_wandb_calls(package: FakePackage, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    assert log_run(folder, package, 1, 2) == [] == log_run(folder, package, 2, 3)
    first, second = package.arguments_of("init")
    assert first["id"] == second["id"] and first["resume"] == "allow" and first["dir"] == str(folder)
    assert (first["project"], first["name"], first["config"]) == ("megarl", "a run", {"run": {"seed": 1}})
    assert package.arguments_of("Settings")[0]["console"] == "off", "no terminal output"
    logged = package.arguments_of("Run.log")
    steps = [value["step"] for value in logged if "rollout/reward_mean" in value["data"]]
    assert steps == [1, 2, 3], "the repeated step is not logged again"
    assert logged[0]["data"] == FIGURES and {"data": {"rollouts": "table"}, "step": 2} in logged
    assert package.arguments_of("Table")[0]["data"] == [list(ROW)]
    assert package.arguments_of("Run.alert")[0] == {"title": "step 2", "text": "actor/entropy is low"}
    assert package.calls[-1][0] == "Run.finish" and len(package.arguments_of("Run.finish")) == 2


@pytest.mark.parametrize("package", ["swanlab"], indirect=True)
def test_swanlab_calls(package: FakePackage, tmp_path: Path) -> None:
    assert log_run(tmp_path, package, 1, 2) == [] == log_run(tmp_path, package, 2, 3)
    first, second = package.arguments_of("init")
    assert first["id"] == second["id"] and first["resume"] == "allow" and first["mode"] is None
    assert first["log_dir"] == str(tmp_path / "swanlab") and package.arguments_of("Settings")[0] == {
        "interactive": False
    }
    logged = package.arguments_of("Run.log")
    assert [value["step"] for value in logged if "rollout/reward_mean" in value["data"]] == [1, 2, 3]
    assert logged[0]["data"] == {"rollout/reward_mean": 0.5, "x_odd/_/name": 1.5}, "sanitized names"
    assert {"data": {"alarms": "text"}, "step": 2} in logged
    assert package.arguments_of("echarts.Table.add")[0]["rows"] == [list(ROW)] and package.calls[-1][0] == "Run.finish"


@pytest.mark.parametrize("package", ["mlflow"], indirect=True)
def test_mlflow_calls(package: FakePackage, tmp_path: Path) -> None:
    assert log_run(tmp_path, package, 1, 2) == [] == log_run(tmp_path, package, 2, 3)
    assert package.arguments_of("MlflowClient")[0] == {"tracking_uri": (tmp_path / "mlflow").as_uri()}
    assert package.arguments_of("MlflowClient.create_experiment") == [{"name": "megarl"}]
    assert package.arguments_of("MlflowClient.create_run") == [{"experiment_id": "3", "run_name": tmp_path.name}]
    assert package.arguments_of("MlflowClient.update_run") == [{"run_id": "run-7", "status": "RUNNING"}], (
        "resumed in the same run"
    )
    assert package.arguments_of("entities.Param") == [{"key": "run.seed", "value": "1"}], "logged once"
    assert package.arguments_of("MlflowClient.log_batch")[0] == {"run_id": "run-7", "params": ["parameter"]}
    metrics = [(item["key"], item["value"], item["step"]) for item in package.arguments_of("entities.Metric")]
    assert metrics[:2] == [("rollout/reward_mean", 0.5, 1), ("x_odd/_/name", 1.5, 1)]
    assert [step for name, _, step in metrics if name == "rollout/reward_mean"] == [1, 2, 3]
    files = [value["artifact_file"] for value in package.arguments_of("MlflowClient.log_text")]
    assert files[0] == "config.json" and "rollouts/step_000002.json" in files
    assert package.calls[-1] == ("MlflowClient.set_terminated", {"run_id": "run-7"})


@pytest.mark.parametrize(
    ("package", "call"),
    [("wandb", "init"), ("wandb", "Run.log"), ("swanlab", "init"), ("mlflow", "MlflowClient.create_run")],
    indirect=["package"],
)
def test_network_failure_is_reported_once(package: FakePackage, call: str, tmp_path: Path) -> None:
    package.fails[call] = ConnectionError("no route to host")
    (warned,) = log_run(tmp_path, package, 1, 3)
    assert "no route to host" in warned and "0123456789abcdef" not in warned
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("name", PARAMETERS)
def test_fakes_match_the_installed_package(name: str) -> None:
    real = pytest.importorskip(name)
    for path, text in PARAMETERS[name].items():
        actual = inspect.signature(eval(f"lambda {text}: None")).parameters
        expected = inspect.signature(resolve(real, path)).parameters
        for parameter in actual.values():
            assert parameter.name in expected, (path, parameter.name)
            assert (expected[parameter.name].default is inspect.Parameter.empty) == (
                parameter.default is inspect.Parameter.empty
            ), (path, parameter.name)
    if name in SETTINGS:
        assert set(SETTINGS[name]) <= set(real.Settings.model_fields)


def resolve(package: Any, path: str) -> Any:
    """Return a member by its dotted path, importing `entities` if needed."""
    if path.startswith("entities."):
        package = importlib.import_module(package.__name__)
        importlib.import_module(f"{package.__name__}.entities")
    return functools.reduce(getattr, path.split("."), package)
