"""Write metrics to `metrics.jsonl` and the configured trackers. A full disk costs metrics, never the run."""

from __future__ import annotations

import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import ConfigError
from megarl.observe.trackers.adapter import Row, TrackerAdapter, TrackerRun, TrackerState, TrackerWorker
from megarl.utils import exact_json
from megarl.utils.text import write_atomically


class TrackerInfo(NamedTuple):
    """A tracker that `track.trackers` can name."""

    title: str
    class_name: str  # of the adapter
    package: str  # what the adapter imports
    distribution: str  # what pip installs


# By the name of the adapter's module.
TRACKERS = {
    "tensorboard": TrackerInfo("TensorBoard", "TensorBoard", "tensorboard", "tensorboard"),
    "wandb": TrackerInfo("W&B", "Wandb", "wandb", "wandb"),
    "swanlab": TrackerInfo("SwanLab", "SwanLab", "swanlab", "swanlab"),
    "mlflow": TrackerInfo("MLflow", "MLflow", "mlflow", "mlflow-skinny"),
    "prometheus": TrackerInfo("Prometheus", "Prometheus", "prometheus_client", "prometheus-client"),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is not installed or is named twice. Imports nothing."""
    for name in names:
        if list(names).count(name) > 1:
            raise ConfigError(f"track.trackers: {name} is named twice; name each tracker once")
        try:
            is_installed = importlib.util.find_spec(TRACKERS[name].package) is not None
        except (ImportError, ValueError):
            is_installed = False
        if not is_installed:
            command = f"pip install {TRACKERS[name].distribution}"
            raise ConfigError(f"track.trackers: {name} is not installed; run `{command}`, or remove it from the list")


def open_adapter(name: str, run: TrackerRun) -> TrackerAdapter:
    """Open a tracker's adapter for a run. Raises whatever its package raises."""
    module = importlib.import_module(f"megarl.observe.trackers.{name}")
    adapter: TrackerAdapter = getattr(module, TRACKERS[name].class_name)(run)
    return adapter


class Tracker:
    """Writes the metrics of a run. On rank 0 only.

    Args:
        names: trackers to feed, keys of `TRACKERS`.
        warn: called once for each kind of output that cannot be written.
        config: configuration that trackers show, without secrets.
    """

    def __init__(
        self,
        run_dir: Path,
        names: Sequence[str] = ("tensorboard",),
        warn: Callable[[str], None] = warnings.warn,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._warn = warn
        self.path = run_dir / "metrics.jsonl"
        self._has_started = self._has_failed = False
        run, states = TrackerRun(run_dir, config=config or {}), run_dir / "trackers"
        self._workers = [
            TrackerWorker(TRACKERS[name].title, run, TrackerState(states / f"{name}.json"), partial(open_adapter, name))
            for name in names
        ]

    def log(self, step: int, metrics: Mapping[str, float], current_step: int = 0) -> None:
        """Append a line `{"step": ..., "time": seconds since the Unix epoch, name: value, ...}` and feed the trackers.

        Trackers write in the background, because all ranks wait for this one. A step may have several lines (training,
        evaluation); after a resume the last value of a metric counts.

        Args:
            current_step: the run's step, if later than `step`. Append-only trackers log the metrics at that step, with
                their own step as `eval/after_step`.
        """
        try:
            if not self._has_started:
                self._has_started = True
                self._drop_repeated(step, metrics)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(exact_json.dumps({"step": step, "time": time.time(), **metrics}) + "\n")
        except (OSError, ValueError) as error:
            if not self._has_failed:
                self._warn(f"could not write metrics.jsonl: {error}; training continues without it")
            self._has_failed = True
        for worker in self._workers:
            worker.log_metrics(step, metrics, current_step)
        self._check_failures()

    def alarm(self, step: int, text: str) -> None:
        """Send an alarm to the trackers as text."""
        for worker in self._workers:
            worker.log_text(step, text)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Send a table of rollouts to the trackers, with the columns `trackers.adapter.COLUMNS`."""
        if rows:
            for worker in self._workers:
                worker.log_table(step, rows)

    def _check_failures(self) -> None:
        for worker in self._workers:
            if failure := worker.pop_failure():
                self._warn(failure)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._check_failures()

    def _drop_repeated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Drop the lines of steps that a resumed run repeats, and a line truncated by a crash.

        Lines of `step` itself are dropped only if they share a name with `metrics`: those of an evaluation stay.
        """
        if self.path.is_file():
            names = metrics.keys() - {"step", "time"}
            rows = [row for _, row in iter_lines(self.path.read_text(encoding="utf-8")) if row is not None]
            remaining = [row for row in rows if row["step"] < step or row["step"] == step and not names & row.keys()]
            write_atomically(self.path, "".join(exact_json.dumps(row) + "\n" for row in remaining))


def iter_lines(text: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield number and content of each line of a metrics.jsonl; None for a damaged line."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = exact_json.loads(line)
            except (ValueError, RecursionError):
                row = None
            is_valid = isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < 2**53
            yield number, row if is_valid else None


def collect_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return metrics by step, ascending; the last value of a metric counts."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        values = {name: value for name, value in row.items() if name not in ("step", "time")}
        steps.setdefault(row["step"], {}).update(values)
    return dict(sorted(steps.items()))


def read_metrics(run_dir: str | Path) -> dict[int, dict[str, float]]:
    """Return metrics by step, also of a run in progress; empty if there are none."""
    path = Path(run_dir) / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return collect_metrics(row for _, row in iter_lines(text) if row is not None)
