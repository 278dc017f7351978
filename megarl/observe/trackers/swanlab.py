"""SwanLab adapter. Needs `SWANLAB_API_KEY` or `swanlab login`; honors SWANLAB_PROJECT and SWANLAB_MODE.

With SWANLAB_MODE=offline it writes to `<run>/swanlab`, for `swanlab sync`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import ClassVar

from megarl.observe.trackers.adapter import COLUMNS, PROJECT, Row, TrackerRun, sanitize_name


class SwanLab:
    is_append_only: ClassVar[bool] = True

    def __init__(self, run: TrackerRun) -> None:
        import swanlab

        self._swanlab = swanlab
        self.id = run.id or secrets.token_hex(8)
        folder = run.run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT") or PROJECT,
            name=run.name,
            id=self.id,
            resume="allow",
            log_dir=str(folder),
            mode=os.environ.get("SWANLAB_MODE") or None,  # type: ignore[arg-type]
            config=dict(run.config),
            settings=swanlab.Settings(interactive=False),
        )

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({sanitize_name(name): value for name, value in values.items()}, step=step)

    def log_text(self, step: int, text: str) -> None:
        self._run.log({"alarms": self._swanlab.Text(text)}, step=step)

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        table = self._swanlab.echarts.Table()
        table.add(list(COLUMNS), [list(row) for row in rows])
        self._run.log({"rollouts": table}, step=step)

    def close(self) -> None:
        self._run.finish()
