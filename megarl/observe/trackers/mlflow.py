"""MLflow adapter: logs to MLFLOW_TRACKING_URI, else to files in `<run>/mlflow`. Honors MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from megarl.observe.run_folder import flatten
from megarl.observe.trackers.adapter import COLUMNS, PROJECT, Row, TrackerRun, sanitize_name

_METRICS_PER_REQUEST = 1000
"""Maximum metrics per request."""
_PARAMS_PER_REQUEST = 100
_LONGEST_VALUE = 6000
"""Maximum characters of a parameter value."""


class MLflow:
    is_append_only: ClassVar[bool] = True

    def __init__(self, run: TrackerRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (run.run_dir / "mlflow").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow discourages file stores
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._param, self._client = Metric, Param, MlflowClient(tracking_uri=uri)
        self.id = run.id
        try:
            if run.id:
                self._client.update_run(run.id, status="RUNNING")
        except Exception:  # noqa: BLE001  its store was removed: start a new run
            self.id = ""
        self.id = self.id or self._create_run(run)

    def _create_run(self, run: TrackerRun) -> str:
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        existing = self._client.get_experiment_by_name(experiment_name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(experiment_name)
        run_id: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = []
        for key, value in flatten(run.config).items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            params.append(self._param(sanitize_name(key), text[:_LONGEST_VALUE]))
        for start in range(0, len(params), _PARAMS_PER_REQUEST):
            self._client.log_batch(run_id, params=params[start : start + _PARAMS_PER_REQUEST])
        self._client.log_text(run_id, json.dumps(dict(run.config), indent=1, default=str), "config.json")
        return run_id

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(sanitize_name(name), float(value), now, step) for name, value in values.items()]
        for start in range(0, len(metrics), _METRICS_PER_REQUEST):
            self._client.log_batch(self.id, metrics=metrics[start : start + _METRICS_PER_REQUEST])

    def log_text(self, step: int, text: str) -> None:
        self._client.log_text(self.id, text, f"alarms/step_{step:06d}_{time.time_ns()}.txt")

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        """Log one file per step: MLflow's own tables are reread and rewritten on each append."""
        table = {"columns": COLUMNS, "data": rows}
        self._client.log_text(self.id, json.dumps(table, default=str), f"rollouts/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self.id)
