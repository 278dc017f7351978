"""MLflow: at MLFLOW_TRACKING_URI, else in files in `<run>/mlflow`; MLFLOW_EXPERIMENT_NAME as everywhere."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megarl.observe.trackers.adapter import COLUMNS, PROJECT, Row, TrackerRun, sanitize_name

_METRICS_PER_REQUEST = 1000
"""Figures that a server takes in one request."""
_PARAMS_PER_REQUEST = 100
_LONGEST_VALUE = 6000
"""Characters of a parameter."""


class MLflow:
    is_append_only: ClassVar[bool] = True

    def __init__(self, told: TrackerRun) -> None:
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            place = (told.run_dir / "mlflow").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it would rather have a server
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._param, self._client = Metric, Param, MlflowClient(tracking_uri=place)
        self.id = told.id if told.id and self._reopen_run(told.id) else self._create_run(told)

    def _reopen_run(self, run: str) -> bool:
        try:
            self._client.update_run(run, status="RUNNING")
        except Exception:  # noqa: BLE001  its store was removed: then it begins anew
            return False
        return True

    def _create_run(self, told: TrackerRun) -> str:
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(wanted)
        experiment = found.experiment_id if found else self._client.create_experiment(wanted)
        run: str = self._client.create_run(experiment, run_name=told.name).info.run_id
        parameters = [self._param(sanitize_name(key), text[:_LONGEST_VALUE]) for key, text in flat(told.config)]
        for first in range(0, len(parameters), _PARAMS_PER_REQUEST):
            self._client.log_batch(run, params=parameters[first : first + _PARAMS_PER_REQUEST])
        self._client.log_text(run, json.dumps(dict(told.config), indent=1, default=str), "config.json")
        return run

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        figures = [self._metric(sanitize_name(name), float(value), now, step) for name, value in values.items()]
        for first in range(0, len(figures), _METRICS_PER_REQUEST):
            self._client.log_batch(self.id, metrics=figures[first : first + _METRICS_PER_REQUEST])

    def log_text(self, step: int, text: str) -> None:
        self._client.log_text(self.id, text, f"alarms/step_{step:06d}_{time.time_ns()}.txt")

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        """A file of its own for each step: MLflow's own table would be read and written anew each time."""
        table = {"columns": COLUMNS, "data": rows}
        self._client.log_text(self.id, json.dumps(table, default=str), f"rollouts/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self.id)


def flat(tree: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """The keys of a configuration as they are named on the command line, `section.key`, each with its value as text."""
    pairs = []
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            pairs += flat(value, f"{before}{name}.")
        else:
            pairs.append((f"{before}{name}", value if isinstance(value, str) else json.dumps(value, default=str)))
    return pairs
