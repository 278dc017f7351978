"""Weights & Biases adapter. Needs `WANDB_API_KEY` or `wandb login`; honors WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE.

With WANDB_MODE=offline it writes to `<run>/wandb`, for `wandb sync`.
"""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import ClassVar
from urllib.parse import urlsplit

from megarl.observe.trackers.adapter import COLUMNS, PROJECT, Row, TrackerRun


class Wandb:
    is_append_only: ClassVar[bool] = True  # wandb rejects steps before the last one

    def __init__(self, run: TrackerRun) -> None:
        _require_key()
        import wandb

        self._wandb = wandb
        self.id = run.id or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or run.name,
            id=self.id,
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
            # Capture neither terminal output, nor code, nor the command line.
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True
            ),
        )

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_text(self, step: int, text: str) -> None:
        self._run.alert(title=f"step {step}", text=text)

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        data = [list(row) for row in rows]
        self._run.log({"rollouts": self._wandb.Table(columns=list(COLUMNS), data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _require_key() -> None:
    """Raise RuntimeError without a key, for which wandb would prompt on a terminal that nobody watches."""
    if os.environ.get("WANDB_MODE", "online") not in ("online", "shared"):
        return
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    try:
        login = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        login = None
    if login is None:
        raise RuntimeError("no API key: export WANDB_API_KEY, or WANDB_MODE=offline")
