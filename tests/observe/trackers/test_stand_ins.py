"""What the adapters ask of their packages, by stand-ins that take a call only as the real ones would; these are held
against the packages where they are installed. What a package makes of a call is `test_adapters.py`'s."""

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

from stand_ins import PARAMETERS, SETTINGS, StandIn  # noqa: E402

pytestmark = pytest.mark.alone

ROW = (1, "two and two?", "4", 1.0, 12, "stop")
FIGURES = {"rollout/reward_mean": 0.5, "x|odd/../name": 1.5}


@pytest.fixture
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME", "SWANLAB_MODE", "SWANLAB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    created = StandIn(request.param)
    for name, module in created.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return created


def a_run(folder: Path, package: StandIn, first: int, last: int) -> list[str]:
    """What was warned of."""
    said: list[str] = []
    tracker = Tracker(folder, [package.package], said.append, config={"run": {"seed": 1}})
    for step in range(first, last + 1):
        tracker.log(step, FIGURES)
    tracker.table(last, [ROW])
    tracker.alarm(last, "actor/entropy is low")
    tracker.close()
    return said


@pytest.mark.parametrize("package", ["wandb"], indirect=True)
def test_wandb(package: StandIn, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    assert a_run(folder, package, 1, 2) == [] == a_run(folder, package, 2, 3)
    first, second = package.named("init")
    assert first["id"] == second["id"] and first["resume"] == "allow" and first["dir"] == str(folder)
    assert (first["project"], first["name"], first["config"]) == ("megarl", "a run", {"run": {"seed": 1}})
    assert package.named("Settings")[0]["console"] == "off", "nothing of the terminal"
    logged = package.named("Run.log")
    steps = [value["step"] for value in logged if "rollout/reward_mean" in value["data"]]
    assert steps == [1, 2, 3], "the step that was taken again is not told again"
    assert logged[0]["data"] == FIGURES and {"data": {"rollouts": "table"}, "step": 2} in logged
    assert package.named("Table")[0]["data"] == [list(ROW)]
    assert package.named("Run.alert")[0] == {"title": "step 2", "text": "actor/entropy is low"}
    assert package.calls[-1][0] == "Run.finish" and len(package.named("Run.finish")) == 2


@pytest.mark.parametrize("package", ["swanlab"], indirect=True)
def test_swanlab(package: StandIn, tmp_path: Path) -> None:
    assert a_run(tmp_path, package, 1, 2) == [] == a_run(tmp_path, package, 2, 3)
    first, second = package.named("init")
    assert first["id"] == second["id"] and first["resume"] == "allow" and first["mode"] is None
    assert first["log_dir"] == str(tmp_path / "swanlab") and package.named("Settings")[0] == {"interactive": False}
    logged = package.named("Run.log")
    assert [value["step"] for value in logged if "rollout/reward_mean" in value["data"]] == [1, 2, 3]
    assert logged[0]["data"] == {"rollout/reward_mean": 0.5, "x_odd/_/name": 1.5}, "names that it takes"
    assert {"data": {"alarms": "text"}, "step": 2} in logged
    assert package.named("echarts.Table.add")[0]["rows"] == [list(ROW)] and package.calls[-1][0] == "Run.finish"


@pytest.mark.parametrize("package", ["mlflow"], indirect=True)
def test_mlflow(package: StandIn, tmp_path: Path) -> None:
    assert a_run(tmp_path, package, 1, 2) == [] == a_run(tmp_path, package, 2, 3)
    assert package.named("MlflowClient")[0] == {"tracking_uri": (tmp_path / "mlflow").as_uri()}
    assert package.named("MlflowClient.create_experiment") == [{"name": "megarl"}]
    assert package.named("MlflowClient.create_run") == [{"experiment_id": "3", "run_name": tmp_path.name}]
    assert package.named("MlflowClient.update_run") == [{"run_id": "run-7", "status": "RUNNING"}], "it goes on in it"
    assert package.named("entities.Param") == [{"key": "run.seed", "value": "1"}], "told once"
    assert package.named("MlflowClient.log_batch")[0] == {"run_id": "run-7", "params": ["parameter"]}
    figures = [(item["key"], item["value"], item["step"]) for item in package.named("entities.Metric")]
    assert figures[:2] == [("rollout/reward_mean", 0.5, 1), ("x_odd/_/name", 1.5, 1)]
    assert [step for name, _, step in figures if name == "rollout/reward_mean"] == [1, 2, 3]
    files = [value["artifact_file"] for value in package.named("MlflowClient.log_text")]
    assert files[0] == "config.json" and "rollouts/step_000002.json" in files
    assert package.calls[-1] == ("MlflowClient.set_terminated", {"run_id": "run-7"})


@pytest.mark.parametrize(
    ("package", "call"),
    [("wandb", "init"), ("wandb", "Run.log"), ("swanlab", "init"), ("mlflow", "MlflowClient.create_run")],
    indirect=["package"],
)
def test_without_a_network_the_run_goes_on_and_says_so_once(package: StandIn, call: str, tmp_path: Path) -> None:
    package.fails[call] = ConnectionError("no route to host")
    (said,) = a_run(tmp_path, package, 1, 3)
    assert "no route to host" in said and "0123456789abcdef" not in said
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_real_package_takes_the_same(name: str) -> None:
    real = pytest.importorskip(name)
    for path, text in PARAMETERS[name].items():
        mine = inspect.signature(eval(f"lambda {text}: None")).parameters
        theirs = inspect.signature(found(real, path)).parameters
        for parameter in mine.values():
            assert parameter.name in theirs, (path, parameter.name)
            assert (theirs[parameter.name].default is inspect.Parameter.empty) == (
                parameter.default is inspect.Parameter.empty
            ), (path, parameter.name)
    if name in SETTINGS:
        assert set(SETTINGS[name]) <= set(real.Settings.model_fields)


def found(package: Any, path: str) -> Any:
    """By its name, also in a module that is not imported with the package."""
    if path.startswith("entities."):
        package = importlib.import_module(package.__name__)
        importlib.import_module(f"{package.__name__}.entities")
    return functools.reduce(getattr, path.split("."), package)
