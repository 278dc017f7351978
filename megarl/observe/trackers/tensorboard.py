"""TensorBoard: event files in `<run>/tensorboard`."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import ClassVar

from megarl.observe.trackers.sink import COLUMNS, Row, Told


class TensorBoard:
    """What was written for steps from the first on is purged by the reader: a resumed run takes them again."""

    appends: ClassVar[bool] = False
    id = ""

    def __init__(self, told: Told) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import

        folder = told.run_dir / "tensorboard"
        again = folder.is_dir() and any(folder.iterdir())
        self._writer = SummaryWriter(str(folder), purge_step=told.first + 1 if again else None)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def text(self, step: int, text: str) -> None:
        self._writer.add_text("alarms", text, step)
        self._writer.flush()

    def table(self, step: int, rows: Sequence[Row]) -> None:
        lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
        self._writer.add_text("rollouts", "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)

    def close(self) -> None:
        self._writer.close()


def _cell(value: object) -> str:
    """A cell of Markdown, in which nothing that a policy wrote is more than text."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")
