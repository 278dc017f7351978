"""Where the seconds of a step of `bench.py flow` go: wall-clock and CPU seconds by part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NOT_OURS = "model"
"""The mocked part, for model, optimizer and engine, which is not among a step's host seconds."""


class Parts:
    """Wall-clock and CPU seconds by part. Time in a part within another counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.busy: dict[str, float] = {}
        self.computed = 0
        """Tokens of the micro-batches that were built."""
        self._open: list[str] = []
        self._last = 0.0, 0.0

    @property
    def moment(self) -> str:
        """Report the current moment of a step, under the names of `models.host_memory.moments`."""
        parts = tuple(self._open)
        if "log" in parts:
            return "recording"
        if "checks" in parts:
            return "update"
        if "numbers back" in parts:
            return "forward"
        return {"mini-batches": "cutting", "token functions": "advantages"}.get("".join(parts[-1:]), "else")

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        self._lap()
        self._open.append(part)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    def _lap(self) -> None:
        current = time.perf_counter(), time.thread_time()
        if self._open:
            for totals, ended, start in zip((self.seconds, self.busy), current, self._last, strict=True):
                totals[self._open[-1]] = totals.get(self._open[-1], 0.0) + ended - start
        self._last = current

    def time_calls(self, owner: Any, name: str, part: str) -> None:
        """Time a function of a module or class, whoever calls it."""
        wrapped = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self.measure(part):
                return wrapped(*arguments, **keywords)

        static = isinstance(owner, type) and isinstance(vars(owner).get(name), staticmethod)
        setattr(owner, name, staticmethod(timed) if static else timed)

    def time_iteration(self, owner: Any, name: str, part: str) -> None:
        """Time a generator until each of its yields."""
        wrapped = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Iterator[Any]:
            source = wrapped(*arguments, **keywords)
            while True:
                with self.measure(part):
                    try:
                        value = next(source)
                    except StopIteration:
                        return
                yield value

        setattr(owner, name, timed)
