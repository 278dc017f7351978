"""A rank's timeline file: one Chrome trace event per line, appended across resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.clock import Span, Timeline, timeline_file

pytestmark = pytest.mark.alone

STEP = Span("step 1", "step", "main", 1.0, 4.0)
UPDATE = Span("actor_update", "actor", "main", 2.0, 3.5)
GENERATION = Span("generation of step 1", "rollout", "generation", 1.5, 1.75, (2, 3))


def events(file: Path) -> list[dict[str, Any]]:
    """Parse the file as trace viewers do, closing the array."""
    result: list[dict[str, Any]] = json.loads(file.read_text().rstrip().rstrip(",") + "]")
    return result


def test_writes_chrome_trace_events(tmp_path: Path) -> None:
    Timeline(tmp_path, 3, warn=lambda text: None).write([UPDATE, GENERATION, STEP])
    file = tmp_path / "timeline" / "rank_00003.json"
    assert file == timeline_file(tmp_path, 3)
    assert len(file.read_text().splitlines()) == 1 + 5
    timed = {"ph": "X", "pid": 3}
    assert events(file) == [
        {"name": "thread_name", "ph": "M", "pid": 3, "tid": 0, "args": {"name": "main"}},
        {"name": "step 1", "cat": "step", "ts": 1_000_000, "dur": 3_000_000, "tid": 0, "args": {}} | timed,
        {"name": "thread_name", "ph": "M", "pid": 3, "tid": 1, "args": {"name": "generation"}},
        {"name": "generation of step 1", "cat": "rollout", "ts": 1_500_000, "dur": 250_000, "tid": 1}
        | timed
        | {"args": {"ranks": [2, 3]}},
        {"name": "actor_update", "cat": "actor", "ts": 2_000_000, "dur": 1_500_000, "tid": 0, "args": {}} | timed,
    ]


def test_resume_appends_after_a_truncated_line(tmp_path: Path) -> None:
    Timeline(tmp_path, 0, warn=lambda text: None).write([STEP])
    file = timeline_file(tmp_path, 0)
    with file.open("a") as half:
        half.write('{"name": "act')
    Timeline(tmp_path, 0, warn=lambda text: None).write([UPDATE, STEP])
    lines = file.read_text().splitlines()
    assert lines[0] == "[" and lines.count("[") == 1
    assert lines[3] == '{"name": "act' and json.loads(lines[-1].rstrip(","))["name"] == "actor_update"


def test_creates_the_file_with_the_first_step(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, 0, warn=lambda text: None)
    timeline.write([])
    timeline.write([UPDATE])
    assert not list(tmp_path.iterdir())
    timeline.write([STEP])
    timeline.write([UPDATE])  # work after the last step
    assert events(timeline_file(tmp_path, 0))[-1]["name"] == "actor_update"


def test_write_failure_only_warns(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("no folder")
    warned: list[str] = []
    Timeline(tmp_path, 0, warned.append).write([STEP])
    assert len(warned) == 1 and warned[0].startswith("could not write the timeline: ")
