"""A rank that is stopped (SIGSTOP), as its launcher sees it: the last to notice, where no other rank does.

Ranks notice one that hangs (`observe/hangs.py`) when they have waited for it for `run.timeout_s`. While they wait for
storage that is much longer, and where all of them are stopped nobody waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping

from megarl.launching.restarts import Rules
from megarl.processes.family import is_stopped

FURTHER_S = 15.0
"""How long behind `run.timeout_s`: where others notice they know more."""
_LOOK_S = 1.0
_AWAY_S = 10.0
"""Between two looks: the launcher was stopped itself, as by Ctrl-Z or `scontrol suspend`, and its ranks with it."""


class Stopped:
    """How long each rank of one launcher has been stopped."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._looked = 0.0
        self._over = False

    def look(self, ranks: Callable[[], Mapping[int, int]], rules: Rules | None) -> tuple[int, str] | None:
        """Kill a rank that has been stopped for too long, after which the launcher ends the others; which one, and
        what is to be said of it. ranks: the pids of those that are there, by rank. To be called again and again; most
        times it does nothing."""
        now = time.monotonic()
        if rules is None or self._over or now - self._looked < _LOOK_S:
            return None
        if now - self._looked > _AWAY_S:
            self._since.clear()
        self._looked = now
        for rank, pid in ranks().items():
            if not is_stopped(pid):
                self._since.pop(pid, None)
                continue
            seconds = now - self._since.setdefault(pid, now)
            if seconds > rules.timeout_s + FURTHER_S:
                self._over = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                why = f"for {seconds:.0f} s, longer than run.timeout_s={rules.timeout_s:g}"
                return rank, f"error: rank {rank} has been stopped (SIGSTOP) {why}, and was killed"
        return None
