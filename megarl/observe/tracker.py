"""Where metrics go: `metrics.jsonl` always, TensorBoard where asked for. A full disk costs metrics, never the run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megarl.observe import exact_json


class Tracker:
    """Writes the metrics of one run folder. On rank 0 only. warn: is told, once, what cannot be written."""

    def __init__(self, run_dir: Path, tensorboard: bool = True, warn: Callable[[str], None] = warnings.warn) -> None:
        self._warn = warn
        self.path = run_dir / "metrics.jsonl"
        self._tensorboard_dir = run_dir / "tensorboard" if tensorboard else None
        self._writer: Any = None
        self._started = False
        self._failed: set[str] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensorboard")
        self._under_way: Future[None] | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line `{"step": ..., "time": seconds since 1970, name: value, ...}`, and the same to TensorBoard, in
        the background, since all ranks wait for the one that writes.

        A step may have several lines (training, evaluation); after a resume the last value of a name counts.
        """
        if not self._started:
            self._started = True
            self._try("metrics.jsonl", lambda: self._forget(step, metrics))
        line = exact_json.dumps({"step": step, "time": time.time(), **metrics}) + "\n"
        self._try("metrics.jsonl", lambda: self._append(line))
        self._settle()
        if "TensorBoard" not in self._failed:  # else its writer is gone for good; the file may find room again
            self._under_way = self._thread.submit(self._write_tensorboard, step, dict(metrics))

    def alarm(self, step: int, text: str) -> None:
        """For TensorBoard, among its texts."""
        if "TensorBoard" not in self._failed:
            self._settle()
            self._under_way = self._thread.submit(self._write_text, step, text)

    def _settle(self) -> None:
        """Wait until TensorBoard has what it was given before."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._try("TensorBoard", under_way.result)

    def close(self) -> None:
        self._settle()
        self._thread.shutdown()
        if self._writer is not None:
            self._try("TensorBoard", self._writer.close)

    def _append(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def _forget(self, step: int, metrics: Mapping[str, float]) -> None:
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

    def _write_tensorboard(self, step: int, metrics: Mapping[str, float]) -> None:
        if (writer := self._open(step)) is None:
            return
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def _write_text(self, step: int, text: str) -> None:
        if (writer := self._open(step)) is not None:
            writer.add_text("alarms", text, step)
            writer.flush()

    def _open(self, step: int) -> Any:
        """TensorBoard's writer, which is made before the first step's figures; None where it is not wanted."""
        if self._tensorboard_dir is not None and self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import, so not at the head of the file

            again = self._tensorboard_dir.is_dir() and any(self._tensorboard_dir.iterdir())
            self._writer = SummaryWriter(str(self._tensorboard_dir), purge_step=step + 1 if again else None)
        return self._writer

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
