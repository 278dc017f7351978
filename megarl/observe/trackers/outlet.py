"""Feeds one tracker in a thread of its own: a step never waits for it, and nothing that it raises reaches the run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megarl.observe.trackers.sink import Row, Sink, Standing, Told, without_secrets

WAITING = 256
"""What may wait to be written; what comes then is left out of the tracker."""
PATIENCE = 3
"""Failures in a row after which a tracker is given up."""
LAST_S = 20.0
"""How long a run that ends waits for what was not written yet."""


class Outlet:
    """Of the tracker `title`. Only `_serve` runs in the thread."""

    def __init__(self, title: str, opened: Callable[[Told], Sink], told: Told, standing: Standing) -> None:
        self.title, self._opened, self._told, self._standing = title, opened, told, standing
        self._queue: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(WAITING)
        self._failures: list[str] = []
        self._said = False
        self._gone = False
        self._thread: threading.Thread | None = None

    def metrics(self, step: int, values: Mapping[str, float], now: int = 0) -> None:
        """now: the step under way, for trackers that take none before it."""
        given = dict(values)
        self._put(step, lambda sink: self._write(sink, step, given, now))

    def text(self, step: int, text: str) -> None:
        self._put(step, lambda sink: sink.text(step, text))

    def table(self, step: int, rows: Sequence[Row]) -> None:
        def write(sink: Sink) -> None:
            if not sink.appends or step >= self._standing.step:
                sink.table(step, rows)

        self._put(step, write)

    def failure(self) -> str:
        """What went wrong first, once; else nothing."""
        if self._said or not self._failures:
            return ""
        self._said = True
        return f"could not write {self.title}: {self._failures[0]}; training goes on without it"

    def close(self) -> None:
        """Wait a little for what was not written yet."""
        if self._thread is None:
            return
        until = time.monotonic() + LAST_S
        try:
            self._queue.put(None, timeout=LAST_S)
        except queue.Full:
            pass
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._failures.append(f"it does not take what it was given within {LAST_S:.0f} s")

    def _put(self, step: int, work: Callable[[Sink], None]) -> None:
        if self._gone:
            return
        if self._thread is None:
            self._told = replace(self._told, first=step, id=self._standing.id)
            self._thread = threading.Thread(target=self._serve, name=self.title, daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self._failures.append(f"it is behind by {WAITING} writings, and what comes now is left out")

    def _serve(self) -> None:
        sink: Sink | None = None
        in_a_row = 0
        while (work := self._queue.get()) is not None:
            if self._gone:
                continue
            try:
                sink = sink or self._opened(self._told)
                work(sink)
                in_a_row = 0
            except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a library raises: the run goes on
                self._failures.append(without_secrets(str(error)) or type(error).__name__)
                in_a_row += 1
                self._gone = in_a_row >= PATIENCE
        try:
            if sink is not None:
                sink.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._failures.append(without_secrets(str(error)) or type(error).__name__)

    def _write(self, sink: Sink, step: int, values: Mapping[str, float], now: int) -> None:
        if sink.appends and now > step:
            step, values = now, {**values, "eval/after_step": float(step)}
        if not sink.appends:
            sink.metrics(step, values)
        elif new := self._standing.new(step, values):
            sink.metrics(step, new)
            self._standing.keep(sink.id, step, new)
