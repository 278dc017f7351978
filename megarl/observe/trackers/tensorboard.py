"""TensorBoard adapter: event files in `<run>/tensorboard`.

Writes events with TensorBoard's record format but not with its writer, whose thread prints a traceback when the disk is
full and never writes again.
"""

from __future__ import annotations

import html
import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megarl.observe.trackers.adapter import COLUMNS, Row, TrackerRun


class TensorBoard:
    """Writes one event file per start; on resume its readers purge events of repeated steps, from the first step on."""

    is_append_only: ClassVar[bool] = False
    id = ""

    def __init__(self, run: TrackerRun) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary  # takes seconds to import

        self._proto, self._records, self._summary = event_pb2, RecordWriter, summary
        folder = run.run_dir / "tensorboard"
        is_resumed = folder.is_dir() and any(folder.iterdir())
        folder.mkdir(exist_ok=True)
        now = time.time_ns()  # part of the file name, by which readers sort
        self._file = folder / f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{now}"
        events = [self._event(file_version="brain.Event:2")]
        if is_resumed:
            restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            events.append(self._event(step=run.first_step + 1, session_log=restart))
        self._append(events)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.scalar(name, value) for name, value in values.items()]
        self._append([self._event(step=step, summary=scalar) for scalar in scalars])

    def log_text(self, step: int, text: str) -> None:
        self._append([self._event(step=step, summary=self._summary.text("alarms", text))])

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
        text = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        self._append([self._event(step=step, summary=self._summary.text("rollouts", text))])

    def close(self) -> None:
        """Do nothing: everything is written already."""

    def _event(self, **content: Any) -> Any:
        return self._proto.Event(wall_time=time.time(), **content)

    def _append(self, events: Sequence[Any]) -> None:
        """Append all events or, if the disk is full, none: a partial record would hide all later ones."""
        buffer = io.BytesIO()
        records = self._records(buffer)
        for event in events:
            records.write(event.SerializeToString())
        data = buffer.getvalue()
        with self._file.open("ab", buffering=0) as file:
            size, written = file.tell(), 0
            try:
                while written < len(data):
                    written += file.write(data[written:])
            except OSError:
                file.truncate(size)
                raise


def _cell(value: object) -> str:
    """Format a Markdown table cell, escaped so that text of a policy is never markup."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")
