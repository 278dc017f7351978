"""Fake tracker packages that accept the same call parameters as the real ones.

The parameters are those that wandb 0.28 to 0.31 have (wandb/sdk: wandb_init.py, wandb_run.py, wandb_settings.py,
data_types/table.py), SwanLab of August 2026 (swanlab/sdk: cmd/init.py, internal/run, internal/settings) and MLflow
(mlflow/tracking/client.py). A fake does not model what a package does with a call. If a package is installed,
`test_fake_packages.py` compares the parameters with its own, and `test_adapters.py` checks what it writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

PARAMETERS = {
    "wandb": {
        "init": "entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None, "
        "config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None, job_type=None, "
        "mode=None, force=None, reinit=None, resume=None, resume_from=None, fork_from=None, save_code=None, "
        "tensorboard=None, sync_tensorboard=None, monitor_gym=None, settings=None, anonymous=None",
        "Table": "columns=None, data=None, rows=None, dataframe=None, dtype=None, optional=True",
        "Run.log": "data, step=None, commit=None",
        "Run.alert": "title, text, level=None, wait_duration=None",
        "Run.finish": "exit_code=None",
    },
    "swanlab": {
        "init": "*, reinit=None, log_dir=None, mode=None, workspace=None, project=None, public=None, name=None, "
        "color=None, description=None, job_type=None, group=None, tags=None, id=None, resume=None, parallel=None, "
        "config=None, settings=None, callbacks=None",
        "Text": "content, caption=None",
        "Run.log": "data, step=None",
        "Run.finish": "state='success', error=None, async_log_timeout=None",
        "echarts.Table.add": "headers, rows, attributes=None",
    },
    "mlflow": {
        "MlflowClient": "tracking_uri=None, registry_uri=None",
        "entities.Metric": "key, value, timestamp, step",
        "entities.Param": "key, value",
        "MlflowClient.get_experiment_by_name": "name",
        "MlflowClient.create_experiment": "name, artifact_location=None, tags=None",
        "MlflowClient.create_run": "experiment_id, start_time=None, tags=None, run_name=None",
        "MlflowClient.update_run": "run_id, status=None, name=None",
        "MlflowClient.log_batch": "run_id, metrics=(), params=(), tags=()",
        "MlflowClient.log_text": "run_id, text, artifact_file",
        "MlflowClient.set_terminated": "run_id, status=None, end_time=None",
    },
}
SETTINGS = {
    "wandb": ("console", "silent", "disable_git", "disable_code", "x_disable_meta"),
    "swanlab": ("interactive",),
}
"""Fields of `Settings` that the adapters set."""

Call = tuple[str, dict[str, Any]]


class FakePackage:
    """A fake package. calls: name and arguments of each call, in order. fails: exceptions by name of the call."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.calls: list[Call] = []
        self.fails: dict[str, Exception] = {}

    def recorder(self, name: str, returns: Any = None, parameters: str = "") -> Callable[..., Any]:
        signature = inspect.signature(eval(f"lambda {parameters or PARAMETERS[self.package][name]}: None"))

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, dict(signature.bind(*arguments, **keywords).arguments)))
            if name in self.fails:
                raise self.fails[name]
            return returns

        return call

    def arguments_of(self, name: str) -> list[dict[str, Any]]:
        return [arguments for called, arguments in self.calls if called == name]

    def modules(self) -> dict[str, ModuleType]:
        """What is imported, by its name."""
        return getattr(self, self.package)()  # type: ignore[no-any-return]

    def _settings(self) -> Callable[..., Any]:
        fields = ", ".join(f"{name}=None" for name in SETTINGS[self.package])
        return self.recorder("Settings", "settings", f"*, {fields}")

    def wandb(self) -> dict[str, ModuleType]:
        run = SimpleNamespace(**{name: self.recorder(f"Run.{name}") for name in ("log", "alert", "finish")})
        wandb: Any = ModuleType("wandb")
        wandb.init, wandb.Settings = self.recorder("init", run), self._settings()
        wandb.Table = self.recorder("Table", "table")
        return {"wandb": wandb}

    def swanlab(self) -> dict[str, ModuleType]:
        run = SimpleNamespace(**{name: self.recorder(f"Run.{name}") for name in ("log", "finish")})
        swanlab: Any = ModuleType("swanlab")
        swanlab.init, swanlab.Settings = self.recorder("init", run), self._settings()
        swanlab.Text = self.recorder("Text", "text")
        table = SimpleNamespace(add=self.recorder("echarts.Table.add"))
        swanlab.echarts = SimpleNamespace(Table=lambda: table)
        return {"swanlab": swanlab}

    def mlflow(self) -> dict[str, ModuleType]:
        run_info = SimpleNamespace(info=SimpleNamespace(run_id="run-7"))
        returns = {"create_run": run_info, "create_experiment": "3"}
        names = [name.partition(".")[2] for name in PARAMETERS["mlflow"] if name.startswith("MlflowClient.")]
        client = SimpleNamespace(**{name: self.recorder(f"MlflowClient.{name}", returns.get(name)) for name in names})
        mlflow: Any = ModuleType("mlflow")
        entities: Any = ModuleType("mlflow.entities")
        mlflow.MlflowClient = self.recorder("MlflowClient", client)
        entities.Metric = self.recorder("entities.Metric", "metric")
        entities.Param = self.recorder("entities.Param", "parameter")
        return {"mlflow": mlflow, "mlflow.entities": entities}
