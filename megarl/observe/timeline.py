"""Who did what when, on disk: spans as Chrome trace events, which Perfetto and chrome://tracing draw.

    <run>/timeline/rank_00003.json

An array with an event a line, which is not closed, for the run may go on. Each rank writes its own; times are
microseconds since 1970, the process is the rank. With each step its span comes first, then what ended since the step
before; `tools/timeline.py` joins the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megarl.observe.clock import STEP, Span


def timeline_file(run_dir: str | Path, rank: int) -> Path:
    return Path(run_dir) / "timeline" / f"rank_{rank:05d}.json"


class Timeline:
    """Appends one rank's spans. What cannot be written is left out, and `warn` is told."""

    def __init__(self, run_dir: Path, rank: int, warn: Callable[[str], None]) -> None:
        self._file, self._rank, self._warn = timeline_file(run_dir, rank), rank, warn
        self._threads: dict[str, int] = {}
        self._has_steps = False

    def write(self, spans: Iterable[Span]) -> None:
        """Of a run that ends before its first step there is nothing to show, and nothing is written."""
        found = sorted(spans, key=_steps_first)
        self._has_steps = self._has_steps or any(span.category == STEP for span in found)
        lines = [line for span in found for line in self._events(span)] if self._has_steps else []
        if not lines:
            return
        try:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                # What a killed process left of a line is one that no reader takes.
                lines.insert(0, "[" if file.tell() == 0 else "")
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            self._warn(f"could not write the timeline: {error.strerror}; training goes on without it")

    def _events(self, span: Span) -> list[str]:
        found: list[dict[str, Any]] = []
        if span.thread not in self._threads:
            self._threads[span.thread] = len(self._threads)
            found.append({"name": "thread_name", "ph": "M", "args": {"name": span.thread}})
        begin, end = round(span.begin * 1e6), round(span.end * 1e6)
        args = {"ranks": list(span.ranks)} if span.ranks else {}
        found.append(
            {"name": span.name, "cat": span.category, "ph": "X", "ts": begin, "dur": end - begin, "args": args}
        )
        place = {"pid": self._rank, "tid": self._threads[span.thread]}
        return [json.dumps(event | place) + "," for event in found]


def _steps_first(span: Span) -> tuple[bool, float]:
    return span.category != STEP, span.begin
