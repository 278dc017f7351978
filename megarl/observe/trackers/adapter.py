"""The tracker adapter protocol, and the thread that feeds an adapter.

Each tracker has its own thread: a step never waits for it, and none of its exceptions reaches the run. `make_rows`
formats a few rollouts of a step for trackers with tables.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

from megarl.types import Rollout
from megarl.utils.text import one_line, write_atomically

PROJECT = "megarl"
"""Project name, unless the tracker's own environment variable sets another."""
COLUMNS = ("step", "prompt", "answer", "reward", "tokens", "status")
"""Columns of the rollout table."""

_INVALID_CHARS = re.compile(r"[^\w\-./ ]")
_MAX_NAME_CHARS = 250
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|WEBHOOK|URI|URL)S?($|_)", re.I)
_URL_CREDENTIALS = re.compile(r"//[^/\s@]+@")

Row = tuple[Any, ...]


class TrackerAdapter(Protocol):
    """An open run of a tracker. Methods may raise and may block: they are called in the tracker's own thread."""

    is_append_only: ClassVar[bool]
    """Whether logged values cannot be replaced, so that repeated steps must not be logged again."""
    id: str
    """The tracker's run id, by which a resumed run continues it."""

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_text(self, step: int, text: str) -> None:
        """Log an alarm."""

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        """Log a table of rollouts with `COLUMNS`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackerRun:
    """The run that a tracker is opened for.

    Args:
        first_step: step of the first metrics.
        id: the tracker's run id so far; empty for a new run.
        config: configuration without secrets.
    """

    run_dir: Path
    first_step: int = 0
    id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name or PROJECT


class TrackerState:
    """A tracker's progress in `<run>/trackers/NAME.json`, from which a resumed run continues."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.id, self.step, self._names = "", -1, set[str]()
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            self.id, self.step, self._names = str(state["id"]), int(state["step"]), set(map(str, state["names"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a new run, or a file truncated by a crash: then steps may be logged twice

    def filter_new(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that the tracker does not have yet. Steps never go back."""
        if step < self.step:
            return {}
        return {name: value for name, value in values.items() if step > self.step or name not in self._names}

    def save(self, run_id: str, step: int, values: Mapping[str, float]) -> None:
        """Save that the tracker has these metrics, under its run id `run_id`."""
        self._names = {*values} | (self._names if step == self.step else set())
        self.id, self.step = run_id, step
        self._file.parent.mkdir(exist_ok=True)
        text = json.dumps({"id": self.id, "step": self.step, "names": sorted(self._names)})
        write_atomically(self._file, text)


def sanitize_name(name: str) -> str:
    """Return a name that every tracker accepts: letters, digits and `_-. `, in parts separated by `/`."""
    parts = [part.strip(" .") or "_" for part in _INVALID_CHARS.sub("_", name).split("/")]
    return "/".join(parts)[:_MAX_NAME_CHARS].rstrip("/ .")


def redact_secrets(error: BaseException) -> str:
    """Return an error's message in one line, without secrets from environment variables and URLs."""
    return redact_text(one_line(error))[:300]


def redact_text(text: str) -> str:
    """Return text without the values of environment variables that are named like secrets, and without the users and
    passwords in URLs."""
    secrets = {value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 6}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _URL_CREDENTIALS.sub("//***@", text)


MAX_ROLLOUTS = 4
"""Rollouts per table."""
MAX_CELL_CHARS = 1000
"""Characters per table cell."""


def make_rows(step: int, rollouts: Sequence[Rollout]) -> list[Row]:
    """Return table rows (`COLUMNS`) for the first sample of each of the first prompts."""
    first_samples: dict[int, Rollout] = {}
    for rollout in rollouts:
        first_samples.setdefault(rollout.group, rollout)
    rows = []
    for sample in islice(first_samples.values(), MAX_ROLLOUTS):
        user_texts = [message.get("content") for message in sample.prompt.messages if message.get("role") == "user"]
        texts = str(user_texts[-1] or "") if user_texts else "", sample.answer
        cells = (text if len(text) <= MAX_CELL_CHARS else text[:MAX_CELL_CHARS] + " ..." for text in texts)
        rows.append((step, *cells, float(sample.reward), sample.num_tokens, sample.status))
    return rows


QUEUE_SIZE = 256
"""Pending writes; further ones are dropped while the queue is full."""
MAX_FAILURES = 3
"""Consecutive failures after which a tracker is disabled."""
CLOSE_TIMEOUT_S = 20.0
"""How long the end of a run waits for pending writes."""


class TrackerWorker:
    """Feeds one tracker from a queue. Only `_serve` runs in the thread, and what it calls."""

    def __init__(
        self, title: str, run: TrackerRun, state: TrackerState, open_adapter: Callable[[TrackerRun], TrackerAdapter]
    ) -> None:
        self.title, self._run, self._state, self._open_adapter = title, run, state, open_adapter
        self._queue: queue.Queue[Callable[[TrackerAdapter], None] | None] = queue.Queue(QUEUE_SIZE)
        self._failures: list[str] = []
        self._is_reported = self._is_disabled = False
        self._thread: threading.Thread | None = None

    def log_metrics(self, step: int, values: Mapping[str, float], current_step: int = 0) -> None:
        """Queue metrics. current_step: the run's step, at which append-only trackers log metrics of earlier steps."""
        metrics = dict(values)
        self._put(step, lambda adapter: self._write(adapter, step, metrics, current_step))

    def log_text(self, step: int, text: str) -> None:
        self._put(step, lambda adapter: adapter.log_text(step, text))

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        def write(adapter: TrackerAdapter) -> None:
            if not adapter.is_append_only or step >= self._state.step:
                adapter.log_table(step, rows)

        self._put(step, write)

    def pop_failure(self) -> str:
        """Return a message on the first failure, once; else an empty string."""
        if self._is_reported or not self._failures:
            return ""
        self._is_reported = True
        return f"could not write {self.title}: {self._failures[0]}; training continues without it"

    def close(self) -> None:
        """Wait up to `CLOSE_TIMEOUT_S` for pending writes."""
        if self._thread is None:
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            pass
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._failures.append(f"it did not accept its data within {CLOSE_TIMEOUT_S:.0f} s")

    def _put(self, step: int, work: Callable[[TrackerAdapter], None]) -> None:
        if self._is_disabled:
            return
        if self._thread is None:
            self._run = replace(self._run, first_step=step, id=self._state.id)
            self._thread = threading.Thread(target=self._serve, name=self.title, daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self._failures.append(f"{QUEUE_SIZE} writes are pending; further ones are dropped")

    def _serve(self) -> None:
        adapter: TrackerAdapter | None = None
        consecutive_failures = 0
        while (work := self._queue.get()) is not None:
            if self._is_disabled:
                continue
            try:
                adapter = adapter or self._open_adapter(self._run)
                work(adapter)
                consecutive_failures = 0
            except (Exception, SystemExit) as error:  # noqa: BLE001  a library may raise anything; the run goes on
                self._failures.append(redact_secrets(error))
                consecutive_failures += 1
                self._is_disabled = consecutive_failures >= MAX_FAILURES
        try:
            if adapter is not None:
                adapter.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._failures.append(redact_secrets(error))

    def _write(self, adapter: TrackerAdapter, step: int, values: Mapping[str, float], current_step: int) -> None:
        if adapter.is_append_only and current_step > step:
            step, values = current_step, {**values, "eval/after_step": float(step)}
        if not adapter.is_append_only:
            adapter.log_metrics(step, values)
        elif new := self._state.filter_new(step, values):
            adapter.log_metrics(step, new)
            self._state.save(adapter.id, step, new)
