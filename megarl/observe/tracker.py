"""Write metrics to `metrics.jsonl` and the configured trackers. A full disk costs metrics, never the run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megarl.observe.trackers.adapter import Row, TrackerRun, TrackerState, TrackerWorker
from megarl.observe.trackers.names import TRACKERS, open_adapter
from megarl.utils import exact_json


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
        self._started = False
        self._failed: set[str] = set()
        tracker_run = TrackerRun(run_dir, config=config or {})
        self._workers = [
            TrackerWorker(
                TRACKERS[name].title,
                partial(open_adapter, name),
                tracker_run,
                TrackerState(run_dir / "trackers" / f"{name}.json"),
            )
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
        if not self._started:
            self._started = True
            self._try("metrics.jsonl", lambda: self._drop_repeated(step, metrics))
        line = exact_json.dumps({"step": step, "time": time.time(), **metrics}) + "\n"
        self._try("metrics.jsonl", lambda: self._append(line))
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

    def _append(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def _drop_repeated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Drop the lines of steps that a resumed run repeats, and a line truncated by a crash.

        Lines of `step` itself are dropped only if they share a name with `metrics`: those of an evaluation stay.
        """
        if not self.path.is_file():
            return
        names = metrics.keys() - {"step", "time"}
        lines = _whole_lines(self.path)
        kept_lines = [line for line in lines if line["step"] < step or line["step"] == step and not names & line.keys()]
        partial = self.path.with_suffix(".tmp")
        partial.write_text("".join(exact_json.dumps(line) + "\n" for line in kept_lines), encoding="utf-8")
        partial.replace(self.path)

    def _try(self, target: str, write: Any) -> None:
        """Call `write` and survive any failure; warn of the first failure of each kind."""
        try:
            write()
        except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises must not end a training run
            if target not in self._failed:
                self._warn(f"could not write {target}: {error}; training continues without it")
            self._failed.add(target)


def read_metrics(run_dir: str | Path) -> dict[int, dict[str, float]]:
    """Return metrics by step, also of a run in progress; empty if there are none."""
    path = Path(run_dir) / "metrics.jsonl"
    steps: dict[int, dict[str, float]] = {}
    if path.is_file():
        for line in _whole_lines(path):
            values = {name: value for name, value in line.items() if name not in ("step", "time")}
            steps.setdefault(line["step"], {}).update(values)
    return dict(sorted(steps.items()))


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = exact_json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
