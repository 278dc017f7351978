"""TensorBoard: event files in `<run>/tensorboard`.

Written here, by its own records and messages, and not by its writer: that has a thread, which prints a traceback where
the disk is full and writes nothing from then on.
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
    """What was written for steps from the first on is purged by the reader: a resumed run takes them again."""

    is_append_only: ClassVar[bool] = False
    id = ""

    def __init__(self, told: TrackerRun) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary  # seconds to import

        self._proto, self._records, self._summary = event_pb2, RecordWriter, summary
        folder = told.run_dir / "tensorboard"
        again = folder.is_dir() and any(folder.iterdir())
        folder.mkdir(exist_ok=True)
        now = time.time_ns()  # in its name, by which readers sort files
        self._file = folder / f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{now}"
        begin = [self._event(file_version="brain.Event:2")]
        if again:
            restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            begin.append(self._event(step=told.first + 1, session_log=restart))
        self._append(begin)

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
        """Everything is written."""

    def _event(self, **content: Any) -> Any:
        return self._proto.Event(wall_time=time.time(), **content)

    def _append(self, events: Sequence[Any]) -> None:
        """All of them or, where there is no room, none: half a record would hide all that comes later."""
        buffer = io.BytesIO()
        records = self._records(buffer)
        for event in events:
            records.write(event.SerializeToString())
        data = buffer.getvalue()
        with self._file.open("ab", buffering=0) as file:
            size, done = file.tell(), 0
            try:
                while done < len(data):
                    done += file.write(data[done:])
            except OSError:
                file.truncate(size)
                raise


def _cell(value: object) -> str:
    """A cell of Markdown, in which nothing that a policy wrote is more than text."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")
