"""The recording that `rollout.replay` names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from megarl.config.strict import ConfigError

_SPEC = re.compile(r"(.+)@(\d{1,9})")


class ReplaySource(NamedTuple):
    """A run folder, or a policy's folder in one, and where in it a replay begins. `str` is the inverse of `parse`."""

    folder: Path
    first_step: int = 1
    """The recorded step that is replayed as step 1."""

    @staticmethod
    def parse(text: str) -> ReplaySource:
        """Parse `RUN`, or `RUN@7` to replay from recorded step 7 on. Raises ConfigError."""
        match = None if Path(text).is_dir() else _SPEC.fullmatch(text)
        if match is None:
            return ReplaySource(Path(text))
        if int(match[2]) < 1:
            raise ConfigError(f"rollout.replay={text}: steps count from 1")
        return ReplaySource(Path(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.folder}@{self.first_step}" if self.first_step > 1 else str(self.folder)

    def recorded_step(self, step: int) -> int:
        """Return the recorded step that is replayed as step `step` of this run."""
        return self.first_step - 1 + step
