"""Where the seconds of a step go: named phases, each the sum of its visits, and spans of who did what when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

WAIT, DATA, ELSEWHERE, STEP = "wait", "data", "elsewhere", "step"
"""What a span can be about that is no work: waiting for other ranks or threads; moving rows to other ranks; a call of
a role that is on other ranks; a whole step."""

SHORTEST_S = 0.0005
"""Waits and transfers below this are not kept: there are many, and together they are not much."""

_BETWEEN = time.time() - time.monotonic()
"""From the monotonic clock, which no one sets and which all processes of a machine share, to the time of day, which
machines share."""


class Span(NamedTuple):
    """Times in seconds since 1970. who: the role that is at work here, `rank` for what is no role's, or what else it
    is. ranks: all on whose devices it is, where that is not this rank alone."""

    name: str
    who: str
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
        self.mark: Callable[[str], AbstractContextManager[object]] | None = None
        """While a profiler is at work: makes a range of a span's name in what it records."""
        self._seconds: dict[str, float] = {}
        self._began = time.monotonic()
        self._spans: list[Span] = []
        self._open: list[tuple[str, str]] = []
        self.at: tuple[str, str, float] = ("", "", self._began)
        """The innermost phase that the main thread is in, whose it is, and when the thread has begun or ended one, or
        a span, last."""
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str, who: str = "rank") -> Iterator[None]:
        """A span that counts into `time/<name>`."""
        if self.on_phase is not None:
            self.on_phase(name)
        began = time.monotonic()
        self._open.append((name, who))
        try:
            with self.span(name, who):
                yield
        finally:
            self._open.pop()
            self._stamp()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    @contextmanager
    def span(self, name: str, who: str = "rank", ranks: Sequence[int] = ()) -> Iterator[None]:
        """For the timeline alone. Spans of a thread are within each other, or apart."""
        mark = self.mark
        began = self._stamp()
        try:
            if mark is None:
                yield
            else:
                with mark(name if who == "rank" else f"{name} ({who})"):
                    yield
        finally:
            self.keep(name, who, began, self._stamp(), ranks)

    def _stamp(self) -> float:
        """Now; of the main thread it is kept that it has come so far."""
        now = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self.at = (*(self._open[-1] if self._open else ("", "")), now)
        return now

    def lap(self, step: int | None = None) -> dict[str, float]:
        """Seconds by phase since the last lap, as `time/<phase>`, with the whole as `time/step`; starts anew. step: the
        one that the lap was, if it was one, which then is a span."""
        now = time.monotonic()
        result = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        result["time/step"] = now - self._began
        if step is not None:
            self.keep(f"step {step}", STEP, self._began, now)
        self._seconds, self._began = {}, now
        return result

    def spans(self) -> list[Span]:
        """Those that have ended since the last call."""
        with self._lock:
            found, self._spans = self._spans, []
        return found

    def keep(self, name: str, who: str, begin: float, end: float, ranks: Sequence[int] = (), thread: str = "") -> None:
        """A span that is over, in time.monotonic's seconds. thread: whose it is, where not of this one."""
        if who in (WAIT, DATA) and end - begin < SHORTEST_S:
            return
        current = threading.current_thread()
        main = "main" if current is threading.main_thread() else ""
        called = thread or main or current.name.rstrip("_0123456789")
        with self._lock:
            self._spans.append(Span(name, who, called, begin + _BETWEEN, end + _BETWEEN, ranks))
