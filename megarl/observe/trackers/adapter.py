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

_ODD = re.compile(r"[^\w\-./ ]")
_LONGEST = 250
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|WEBHOOK|URI|URL)S?($|_)", re.I)
_IN_URL = re.compile(r"//[^/\s@]+@")

Row = tuple[Any, ...]


class Sink(Protocol):
    """A run of a tracker. Anything here may raise, and may take its time: it is called in a thread of its own."""

    appends: ClassVar[bool]
    """Whether what it was given stays, so that a step which is taken again must not be given twice."""
    id: str
    """By which it goes on with the run when that is resumed."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, text: str) -> None:
        """An alarm."""

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Rollouts, by `COLUMNS`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Told:
    """What a tracker is told of a run when it is opened. first: the step of the first figures. id: that of its run so
    far, empty for a new one. config: without secrets."""

    run_dir: Path
    first: int = 0
    id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name or PROJECT


class Standing:
    """How far a tracker is with a run, in `<run>/trackers/NAME.json`, so that a resumed run goes on there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.id, self.step, self._names = "", -1, set[str]()
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            self.id, self.step, self._names = str(found["id"]), int(found["step"]), set(map(str, found["names"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a new run, or a file that a crash cut short: then steps may be there twice

    def new(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Those of the figures that the tracker was not given yet: steps only go on."""
        if step < self.step:
            return {}
        return {name: value for name, value in values.items() if step > self.step or name not in self._names}

    def keep(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """That it has them, as the run `name`."""
        self._names = {*values} | (self._names if step == self.step else set())
        self.id, self.step = name, step
        self._file.parent.mkdir(exist_ok=True)
        partial = self._file.with_suffix(".tmp")
        text = json.dumps({"id": self.id, "step": self.step, "names": sorted(self._names)})
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._file)


def plain_name(name: str) -> str:
    """A metric's name as every tracker takes it: parts of letters, digits and `_-. `, with `/` between."""
    parts = [part.strip(" .") or "_" for part in _ODD.sub("_", name).split("/")]
    return "/".join(parts)[:_LONGEST].rstrip("/ .")


def without_secrets(text: str) -> str:
    """What a library says of a failure, in a line, without what this process's environment or a URL has of secrets."""
    line = " ".join(text.split())
    secrets = {value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 6}
    for secret in sorted(secrets, key=len, reverse=True):
        line = line.replace(secret, "***")
    return _IN_URL.sub("//***@", line)[:300]


MOST = 4
"""Rollouts of a step."""
LONGEST = 1000
"""Characters of a cell."""


def rows_of(step: int, rollouts: Sequence[Rollout]) -> list[Row]:
    """By `sink.COLUMNS`: the first sample of each of the first prompts."""
    firsts: dict[int, Rollout] = {}
    for rollout in rollouts:
        firsts.setdefault(rollout.group, rollout)
    return [
        (step, _short(_asked(one)), _short(one.answer), float(one.reward), one.num_tokens, one.status)
        for one in islice(firsts.values(), MOST)
    ]


def _asked(rollout: Rollout) -> str:
    said = [message for message in rollout.prompt.messages if message.get("role") == "user"]
    return str(said[-1].get("content") or "") if said else ""


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."


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
