"""Timeline files: spans as Chrome trace events, for Perfetto and chrome://tracing.

    <run>/timeline/rank_00003.json

Each rank writes its own file: a JSON array with one event per line, left unclosed because the run may go on. Times are
microseconds since the Unix epoch; the trace's process is the rank. Each step's span comes first, followed by the spans
that ended since the previous step. `tools/timeline.py` joins the files.
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
    """Appends one rank's spans to its file. Spans that cannot be written are dropped with a warning."""

    def __init__(self, run_dir: Path, rank: int, warn: Callable[[str], None]) -> None:
        self._file, self._rank, self._warn = timeline_file(run_dir, rank), rank, warn
        self._threads: dict[str, int] = {}
        self._has_steps = False

    def write(self, spans: Iterable[Span]) -> None:
        """Append spans. Nothing is written before the first step is done."""
        ordered = sorted(spans, key=_steps_first)
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


def _steps_first(span: Span) -> tuple[bool, float]:
    return span.category != STEP, span.begin
