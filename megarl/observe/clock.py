"""Where the seconds of a step go: named phases, each the sum of its visits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Times phases. `on_phase` is told the name of each phase that begins, for a live display."""

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self.on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._began = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.on_phase is not None:
            self.on_phase(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap, as `time/<phase>`, with the whole as `time/step`; starts anew."""
        now = time.monotonic()
        result = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        result["time/step"] = now - self._began
        self._seconds, self._began = {}, now
        return result
