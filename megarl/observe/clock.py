"""Step timing: named phases, summed per step, and spans for the timeline in `<run>/timeline/rank_00003.json`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

WAIT, DATA, REMOTE, STEP = "wait", "data", "elsewhere", "step"
"""Categories of spans that are not a role's work: waiting for other ranks or threads, moving rows to other ranks,
calling a role that runs on other ranks, and a whole step."""

MIN_SPAN_S = 0.0005
"""Shorter waits and transfers are dropped: they are many but add up to little."""

_EPOCH_OFFSET_S = time.time() - time.monotonic()
"""Offset from the monotonic clock, which is never adjusted and is shared by all processes of a machine, to the Unix
epoch, which is shared between machines."""


class Span(NamedTuple):
    """A named time interval of one thread, in seconds since the Unix epoch.

    Args:
        category: the role at work, `rank` for work of no role, or one of `WAIT`, `DATA`, `REMOTE`, `STEP`.
        ranks: all ranks whose devices it occupies; empty if only this one.
    """

    name: str
    category: str
    thread: str
    begin: float
    end: float
    ranks: Sequence[int] = ()


class Clock:
    """Measures phases and spans. Phases belong to a single thread; any thread may open spans.

    Args:
        on_phase: called with the name of each phase that begins, for the live display.
    """

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self.on_phase = on_phase
        self.profiler_range: Callable[[str], AbstractContextManager[object]] | None = None
        """Opens a profiler range of the given name. Set only while a profiler records."""
        self._seconds: dict[str, float] = {}
        self._lap_start = time.monotonic()
        self._spans: list[Span] = []
        self._phase_stack: list[tuple[str, str]] = []
        self.position: tuple[str, str, float] = ("", "", self._lap_start)
        """The main thread's innermost phase, its category, and when the thread last entered or left a phase or span."""
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str, category: str = "rank") -> Iterator[None]:
        """Open a span whose duration also counts towards `time/<name>`."""
        if self.on_phase is not None:
            self.on_phase(name)
        start = time.monotonic()
        self._phase_stack.append((name, category))
        try:
            with self.span(name, category):
                yield
        finally:
            self._phase_stack.pop()
            self._update_position()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    @contextmanager
    def span(self, name: str, category: str = "rank", ranks: Sequence[int] = ()) -> Iterator[None]:
        """Record a span for the timeline only. Spans of one thread must nest or be disjoint."""
        profiler_range = self.profiler_range
        start = self._update_position()
        try:
            if profiler_range is None:
                yield
            else:
                with profiler_range(name if category == "rank" else f"{name} ({category})"):
                    yield
        finally:
            self.add_span(name, category, start, self._update_position(), ranks)

    def _update_position(self) -> float:
        """Return the current time; on the main thread, record it in `position` as progress."""
        now = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self.position = (*(self._phase_stack[-1] if self._phase_stack else ("", "")), now)
        return now

    def lap(self, step: int | None = None) -> dict[str, float]:
        """Return seconds per phase since the last lap as `time/<phase>`, their total as `time/step`, and reset.

        Args:
            step: if the lap was a step, its number; a span of category `STEP` is then recorded.
        """
        now = time.monotonic()
        result = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        result["time/step"] = now - self._lap_start
        if step is not None:
            self.add_span(f"step {step}", STEP, self._lap_start, now)
        self._seconds, self._lap_start = {}, now
        return result

    def drain_spans(self) -> list[Span]:
        """Return the spans that ended since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    def add_span(
        self, name: str, category: str, begin: float, end: float, ranks: Sequence[int] = (), thread: str = ""
    ) -> None:
        """Record a finished span, given in `time.monotonic` seconds. thread: its thread if not the current one."""
        if category in (WAIT, DATA) and end - begin < MIN_SPAN_S:
            return
        current = threading.current_thread()
        main_name = "main" if current is threading.main_thread() else ""
        thread_name = thread or main_name or current.name.rstrip("_0123456789")
        with self._lock:
            self._spans.append(Span(name, category, thread_name, begin + _EPOCH_OFFSET_S, end + _EPOCH_OFFSET_S, ranks))


def timeline_file(run_dir: str | Path, rank: int) -> Path:
    return Path(run_dir) / "timeline" / f"rank_{rank:05d}.json"


class Timeline:
    """Appends one rank's spans to its file, as Chrome trace events for Perfetto and chrome://tracing.

    The file is a JSON array with one event per line, left unclosed because the run may go on. Times are microseconds
    since the Unix epoch; the trace's process is the rank. Each step's span comes first, followed by the spans that
    ended since the previous step. `megarl timeline` joins the files of all ranks. Spans that cannot be written are
    dropped with a warning.
    """

    def __init__(self, run_dir: Path, rank: int, warn: Callable[[str], None]) -> None:
        self._file, self._rank, self._warn = timeline_file(run_dir, rank), rank, warn
        self._threads: dict[str, int] = {}
        self._has_steps = False

    def write(self, spans: Iterable[Span]) -> None:
        """Append spans. Nothing is written before the first step is done."""
        ordered = sorted(spans, key=lambda span: (span.category != STEP, span.begin))
        self._has_steps = self._has_steps or any(span.category == STEP for span in ordered)
        lines = [line for span in ordered for line in self._events(span)] if self._has_steps else []
        if not lines:
            return
        try:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                # Start a new line: a killed process may have left a partial one, which readers skip.
                lines.insert(0, "[" if file.tell() == 0 else "")
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            self._warn(f"could not write the timeline: {error.strerror}; training continues without it")

    def _events(self, span: Span) -> list[str]:
        events: list[dict[str, Any]] = []
        if span.thread not in self._threads:
            self._threads[span.thread] = len(self._threads)
            events.append({"name": "thread_name", "ph": "M", "args": {"name": span.thread}})
        begin, end = round(span.begin * 1e6), round(span.end * 1e6)
        args = {"ranks": list(span.ranks)} if span.ranks else {}
        events.append(
            {"name": span.name, "cat": span.category, "ph": "X", "ts": begin, "dur": end - begin, "args": args}
        )
        ids = {"pid": self._rank, "tid": self._threads[span.thread]}
        return [json.dumps(event | ids) + "," for event in events]
