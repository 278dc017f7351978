"""Seconds and processor seconds of ways that take turns, and their ratios.

On a shared machine other programs slow all ways alike only if these take turns (A, B, A, B, ...) and a ratio compares
samples of the same turn. Processor seconds hardly depend on other programs.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil


def process_seconds(pid: int | None = None) -> float:
    """Return the processor seconds of a process, this one by default, and of the children that it has reaped; in steps
    of 10 ms."""
    return sum(psutil.Process(pid).cpu_times()[:4])


def tree_seconds(pid: int | None = None) -> float:
    """Return the processor seconds of a process, its living descendants, and those that these have reaped."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (root := psutil.Process(pid), *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process_seconds(process.pid)
    return total


class Stopwatch:
    """Context manager that measures `seconds`, and `processor_s` by `clock`."""

    seconds = processor_s = 0.0

    def __init__(self, clock: Callable[[], float] = tree_seconds) -> None:
        self._clock = clock

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter(), self._clock()
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds, self.processor_s = time.perf_counter() - self._start[0], self._clock() - self._start[1]


def rotate(ways: Sequence[str], turn: int) -> list[str]:
    """Return the ways in the order of a turn: each is the first as often as the others."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of all turns, and their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def compute_ratio(values: Sequence[float], base: Sequence[float]) -> Ratio | None:
    """Divide each value by that of the same turn. Return None if one of these is 0, too short to measure."""
    if not all(base):
        return None
    ratios = sorted(value / divisor for value, divisor in zip(values, base, strict=True))
    return Ratio(statistics.median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4])


class Samples:
    """Seconds and processor seconds of some ways, by turn. `base` is the way that the others are compared with."""

    def __init__(self, ways: Sequence[str], base: str = "") -> None:
        self.base = base or ways[0]
        self.seconds: dict[str, list[float]] = {way: [] for way in ways}
        self.processor_s: dict[str, list[float]] = {way: [] for way in ways}

    def add(self, way: str, seconds: float, processor_s: float) -> None:
        self.seconds[way].append(seconds)
        self.processor_s[way].append(processor_s)

    def rows(self, more: Mapping[str, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Return a row per way, with medians over the turns, ratios to the base, and the samples themselves. more:
        other columns by way."""
        return [
            {
                "way": way,
                "seconds": statistics.median(seconds),
                "processor s": statistics.median(self.processor_s[way]),
                **((more or {}).get(way, {})),
                "ratio": compute_ratio(seconds, self.seconds[self.base]),
                "ratio of processor s": compute_ratio(self.processor_s[way], self.processor_s[self.base]),
                "samples": {"seconds": seconds, "processor s": self.processor_s[way]},
            }
            for way, seconds in self.seconds.items()
        ]
