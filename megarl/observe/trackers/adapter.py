"""What a tracker adapter implements, and the thread that feeds it.

Each tracker has its own thread: a step never waits for it, and no exception of it reaches the run. `rows_of` prepares a
few rollouts of a step as text for trackers that have tables.
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

PROJECT = "megarl"
"""Under which runs are listed, unless the tracker's own environment variable says another."""
COLUMNS = ("step", "prompt", "answer", "reward", "tokens", "status")
"""Of a table of rollouts."""

_INVALID_CHARS = re.compile(r"[^\w\-./ ]")
_MAX_NAME_CHARS = 250
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|WEBHOOK|URI|URL)S?($|_)", re.I)
_URL_CREDENTIALS = re.compile(r"//[^/\s@]+@")

Row = tuple[Any, ...]


class TrackerAdapter(Protocol):
    """A run of a tracker. Anything here may raise, and may take its time: it is called in a thread of its own."""

    is_append_only: ClassVar[bool]
    """Whether what it was given stays, so that a step which is taken again must not be given twice."""
    id: str
    """By which it goes on with the run when that is resumed."""

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_text(self, step: int, text: str) -> None:
        """An alarm."""

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        """Rollouts, by `COLUMNS`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackerRun:
    """What a tracker is told of a run when it is opened. first: the step of the first figures. id: that of its run so
    far, empty for a new one. config: without secrets."""

    run_dir: Path
    first: int = 0
    id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name or PROJECT


class TrackerState:
    """How far a tracker is with a run, in `<run>/trackers/NAME.json`, so that a resumed run goes on there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.id, self.step, self._names = "", -1, set[str]()
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            self.id, self.step, self._names = str(found["id"]), int(found["step"]), set(map(str, found["names"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a new run, or a file that a crash cut short: then steps may be there twice

    def filter_new(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Those of the figures that the tracker was not given yet: steps only go on."""
        if step < self.step:
            return {}
        return {name: value for name, value in values.items() if step > self.step or name not in self._names}

    def save(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """That it has them, as the run `name`."""
        self._names = {*values} | (self._names if step == self.step else set())
        self.id, self.step = name, step
        self._file.parent.mkdir(exist_ok=True)
        partial = self._file.with_suffix(".tmp")
        text = json.dumps({"id": self.id, "step": self.step, "names": sorted(self._names)})
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._file)


def sanitize_name(name: str) -> str:
    """A metric's name as every tracker takes it: parts of letters, digits and `_-. `, with `/` between."""
    parts = [part.strip(" .") or "_" for part in _INVALID_CHARS.sub("_", name).split("/")]
    return "/".join(parts)[:_MAX_NAME_CHARS].rstrip("/ .")


def redact_secrets(text: str) -> str:
    """What a library says of a failure, in a line, without what this process's environment or a URL has of secrets."""
    line = " ".join(text.split())
    secrets = {value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 6}
    for secret in sorted(secrets, key=len, reverse=True):
        line = line.replace(secret, "***")
    return _URL_CREDENTIALS.sub("//***@", line)[:300]


MAX_ROLLOUTS = 4
"""Rollouts of a step."""
MAX_CELL_CHARS = 1000
"""Characters of a cell."""


def make_rows(step: int, rollouts: Sequence[Rollout]) -> list[Row]:
    """By `sink.COLUMNS`: the first sample of each of the first prompts."""
    firsts: dict[int, Rollout] = {}
    for rollout in rollouts:
        firsts.setdefault(rollout.group, rollout)
    return [
        (step, _truncate(_last_user_message(one)), _truncate(one.answer), float(one.reward), one.num_tokens, one.status)
        for one in islice(firsts.values(), MAX_ROLLOUTS)
    ]


def _last_user_message(rollout: Rollout) -> str:
    said = [message for message in rollout.prompt.messages if message.get("role") == "user"]
    return str(said[-1].get("content") or "") if said else ""


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_CELL_CHARS else text[:MAX_CELL_CHARS] + " ..."


QUEUE_SIZE = 256
"""What may wait to be written; what comes then is left out of the tracker."""
MAX_FAILURES = 3
"""Failures in a row after which a tracker is given up."""
CLOSE_TIMEOUT_S = 20.0
"""How long a run that ends waits for what was not written yet."""


class TrackerWorker:
    """Of the tracker `title`. Only `_serve` runs in the thread."""

    def __init__(
        self, title: str, opened: Callable[[TrackerRun], TrackerAdapter], told: TrackerRun, standing: TrackerState
    ) -> None:
        self.title, self._open_adapter, self._run, self._state = title, opened, told, standing
        self._queue: queue.Queue[Callable[[TrackerAdapter], None] | None] = queue.Queue(QUEUE_SIZE)
        self._failures: list[str] = []
        self._is_reported = False
        self._is_disabled = False
        self._thread: threading.Thread | None = None

    def log_metrics(self, step: int, values: Mapping[str, float], now: int = 0) -> None:
        """now: the step under way, for trackers that take none before it."""
        given = dict(values)
        self._put(step, lambda sink: self._write(sink, step, given, now))

    def log_text(self, step: int, text: str) -> None:
        self._put(step, lambda sink: sink.log_text(step, text))

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        def write(sink: TrackerAdapter) -> None:
            if not sink.is_append_only or step >= self._state.step:
                sink.log_table(step, rows)

        self._put(step, write)

    def pop_failure(self) -> str:
        """What went wrong first, once; else nothing."""
        if self._is_reported or not self._failures:
            return ""
        self._is_reported = True
        return f"could not write {self.title}: {self._failures[0]}; training goes on without it"

    def close(self) -> None:
        """Wait a little for what was not written yet."""
        if self._thread is None:
            return
        until = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            pass
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._failures.append(f"it does not take what it was given within {CLOSE_TIMEOUT_S:.0f} s")

    def _put(self, step: int, work: Callable[[TrackerAdapter], None]) -> None:
        if self._is_disabled:
            return
        if self._thread is None:
            self._run = replace(self._run, first=step, id=self._state.id)
            self._thread = threading.Thread(target=self._serve, name=self.title, daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self._failures.append(f"it is behind by {QUEUE_SIZE} writings, and what comes now is left out")

    def _serve(self) -> None:
        sink: TrackerAdapter | None = None
        in_a_row = 0
        while (work := self._queue.get()) is not None:
            if self._is_disabled:
                continue
            try:
                sink = sink or self._open_adapter(self._run)
                work(sink)
                in_a_row = 0
            except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a library raises: the run goes on
                self._failures.append(redact_secrets(str(error)) or type(error).__name__)
                in_a_row += 1
                self._is_disabled = in_a_row >= MAX_FAILURES
        try:
            if sink is not None:
                sink.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._failures.append(redact_secrets(str(error)) or type(error).__name__)

    def _write(self, sink: TrackerAdapter, step: int, values: Mapping[str, float], now: int) -> None:
        if sink.is_append_only and now > step:
            step, values = now, {**values, "eval/after_step": float(step)}
        if not sink.is_append_only:
            sink.log_metrics(step, values)
        elif new := self._state.filter_new(step, values):
            sink.log_metrics(step, new)
            self._state.save(sink.id, step, new)
