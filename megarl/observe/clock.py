"""Where the seconds of a step go: named phases, each the sum of its visits, and spans of who did what when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

WAIT, DATA, REMOTE, STEP = "wait", "data", "elsewhere", "step"
"""What a span can be about that is no work: waiting for other ranks or threads; moving rows to other ranks; a call of
a role that is on other ranks; a whole step."""

MIN_SPAN_S = 0.0005
"""Waits and transfers below this are not kept: there are many, and together they are not much."""

_EPOCH_OFFSET_S = time.time() - time.monotonic()
"""From the monotonic clock, which no one sets and which all processes of a machine share, to the time of day, which
machines share."""


class Span(NamedTuple):
    """Times in seconds since 1970. who: the role that is at work here, `rank` for what is no role's, or what else it
    is. ranks: all on whose devices it is, where that is not this rank alone."""

    name: str
    category: str
    thread: str
    begin: float
    end: float
    ranks: Sequence[int] = ()


class Clock:
    """Times phases. `on_phase` is told the name of each phase that begins, for a live display.

    Phases are for one thread; spans are for any.
    """

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self.on_phase = on_phase
        self.profiler_range: Callable[[str], AbstractContextManager[object]] | None = None
        """While a profiler is at work: makes a range of a span's name in what it records."""
        self._seconds: dict[str, float] = {}
        self._lap_start = time.monotonic()
        self._spans: list[Span] = []
        self._phase_stack: list[tuple[str, str]] = []
        self.position: tuple[str, str, float] = ("", "", self._lap_start)
        """The innermost phase that the main thread is in, whose it is, and when the thread has begun or ended one, or
        a span, last."""
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str, who: str = "rank") -> Iterator[None]:
        """A span that counts into `time/<name>`."""
        if self.on_phase is not None:
            self.on_phase(name)
        began = time.monotonic()
        self._phase_stack.append((name, who))
        try:
            with self.span(name, who):
                yield
        finally:
            self._phase_stack.pop()
            self._update_position()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    @contextmanager
    def span(self, name: str, who: str = "rank", ranks: Sequence[int] = ()) -> Iterator[None]:
        """For the timeline alone. Spans of a thread are within each other, or apart."""
        mark = self.profiler_range
        began = self._update_position()
        try:
            if mark is None:
                yield
            else:
                with mark(name if who == "rank" else f"{name} ({who})"):
                    yield
        finally:
            self.add_span(name, who, began, self._update_position(), ranks)

    def _update_position(self) -> float:
        """Now; of the main thread it is kept that it has come so far."""
        now = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self.position = (*(self._phase_stack[-1] if self._phase_stack else ("", "")), now)
        return now

    def lap(self, step: int | None = None) -> dict[str, float]:
        """Seconds by phase since the last lap, as `time/<phase>`, with the whole as `time/step`; starts anew. step: the
        one that the lap was, if it was one, which then is a span."""
        now = time.monotonic()
        result = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        result["time/step"] = now - self._lap_start
        if step is not None:
            self.add_span(f"step {step}", STEP, self._lap_start, now)
        self._seconds, self._lap_start = {}, now
        return result

    def drain_spans(self) -> list[Span]:
        """Those that have ended since the last call."""
        with self._lock:
            found, self._spans = self._spans, []
        return found

    def add_span(
        self, name: str, who: str, begin: float, end: float, ranks: Sequence[int] = (), thread: str = ""
    ) -> None:
        """A span that is over, in time.monotonic's seconds. thread: whose it is, where not of this one."""
        if who in (WAIT, DATA) and end - begin < MIN_SPAN_S:
            return
        current = threading.current_thread()
        main = "main" if current is threading.main_thread() else ""
        called = thread or main or current.name.rstrip("_0123456789")
        with self._lock:
            self._spans.append(Span(name, who, called, begin + _EPOCH_OFFSET_S, end + _EPOCH_OFFSET_S, ranks))
