"""Where metrics go: `metrics.jsonl` always, and the trackers that are asked for. A full disk costs metrics, never the
run."""

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
    """Writes the metrics of one run folder. On rank 0 only. warn: is told, once, what cannot be written. config: what
    trackers may show of it."""

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
        told = TrackerRun(run_dir, config=config or {})
        self._workers = [
            TrackerWorker(
                TRACKERS[name].title,
                partial(open_adapter, name),
                told,
                TrackerState(run_dir / "trackers" / f"{name}.json"),
            )
            for name in names
        ]

    def log(self, step: int, metrics: Mapping[str, float], now: int = 0) -> None:
        """Append a line `{"step": ..., "time": seconds since 1970, name: value, ...}`, and give the same to the
        trackers, which write in the background, since all ranks wait for the one that writes.

        A step may have several lines (training, evaluation); after a resume the last value of a name counts. now: the
        step under way, where that is a later one. Trackers that take no earlier step have the figures at that one, with
        `eval/after_step`, the step that they are of.
        """
        if not self._started:
            self._started = True
            self._try("metrics.jsonl", lambda: self._drop_repeated(step, metrics))
        line = exact_json.dumps({"step": step, "time": time.time(), **metrics}) + "\n"
        self._try("metrics.jsonl", lambda: self._append(line))
        for outlet in self._workers:
            outlet.log_metrics(step, metrics, now)
        self._check_failures()

    def alarm(self, step: int, text: str) -> None:
        """For the trackers, among their texts."""
        for outlet in self._workers:
            outlet.log_text(step, text)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """For the trackers: some of the step's rollouts, by `trackers.sink.COLUMNS`."""
        if rows:
            for outlet in self._workers:
                outlet.log_table(step, rows)

    def _check_failures(self) -> None:
        for outlet in self._workers:
            if failure := outlet.pop_failure():
                self._warn(failure)

    def close(self) -> None:
        for outlet in self._workers:
            outlet.close()
        self._check_failures()

    def _append(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def _drop_repeated(self, step: int, metrics: Mapping[str, float]) -> None:
        """A resumed run does the steps after its checkpoint again: drop their lines, and one that a crash cut short.
        metrics: those that are said of `step` now; what else was said of it, by an evaluation, stays."""
        if not self.path.is_file():
            return
        again = metrics.keys() - {"step", "time"}
        lines = _whole_lines(self.path)
        kept = [line for line in lines if line["step"] < step or line["step"] == step and not again & line.keys()]
        partial = self.path.with_suffix(".tmp")
        partial.write_text("".join(exact_json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        partial.replace(self.path)

    def _try(self, what: str, write: Any) -> None:
        """Do it; the first failure of each kind is said, further ones are silent and every one is survived."""
        try:
            write()
        except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises must not end a training run
            if what not in self._failed:
                self._warn(f"could not write {what}: {error}; training goes on without it")
            self._failed.add(what)


def read_metrics(run_dir: str | Path) -> dict[int, dict[str, float]]:
    """Metrics by step, of a run that may still be running. Empty where there are none."""
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
