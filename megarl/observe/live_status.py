"""Current phase of each rank and load of its engine, in `<run>/live/rank_00003.json`, for the live page.

A thread of each rank writes its file when the content changes, and at least every `HEARTBEAT_S`, so that a reader can
tell a rank that has ended without removing its file. The interval grows with the number of ranks: the whole job writes
about `FILES_PER_SECOND` files, whatever its size.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.engine.engine_protocol import EngineLoad
from megarl.rollout.request_gate import set_load_listener
from megarl.utils.text import write_atomically

LIVE_FOLDER = "live"
MIN_INTERVAL_S = 2.0
FILES_PER_SECOND = 100
HEARTBEAT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
"""A run that ends does not wait longer for a disk that hangs."""
LOAD_EXPIRES_S = 15.0
"""An engine's load is dropped when it is older: the engine has no requests."""


class LiveStatus(threading.Thread):
    """Writes the status of one rank until `close`. A disk that fails is ignored: the page then has no status.

    Args:
        read_phase: returns the main thread's phase, empty between phases, and its category; see `Clock.position`.
        read_step: returns the current step.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        world: int,
        read_phase: Callable[[], tuple[str, str]],
        read_step: Callable[[], int],
    ) -> None:
        super().__init__(name="live-status", daemon=True)
        self._file = run_dir / LIVE_FOLDER / f"rank_{rank:05d}.json"
        self._interval_s = max(MIN_INTERVAL_S, world / FILES_PER_SECOND)
        self._rank, self._read_phase, self._read_step = rank, read_phase, read_step
        self._load: tuple[float, EngineLoad, int] | None = None
        """When the engine's load was read, the load, and the number of running conversations."""
        self._phase, self._since = ("", ""), time.time()
        self._closing = threading.Event()
        set_load_listener(self.set_load)

    def set_load(self, load: EngineLoad, num_conversations: int) -> None:
        """Set the load of this rank's engine. Any thread may call it."""
        self._load = time.time(), load, num_conversations

    def read(self) -> dict[str, Any]:
        """Return {rank, step, phase, category, since}, and for a busy engine {running, waiting, cache_usage,
        conversations}. `since`: Unix time since which the rank has been seen in this phase."""
        phase = self._read_phase()
        if phase != self._phase:
            self._phase, self._since = phase, time.time()
        status: dict[str, Any] = {"rank": self._rank, "step": self._read_step(), "since": round(self._since, 1)}
        status |= {"phase": phase[0], "category": phase[1]}
        if self._load is not None and time.time() - self._load[0] < LOAD_EXPIRES_S:
            _, load, num_conversations = self._load
            status |= {"running": load.num_running, "waiting": load.num_waiting, "conversations": num_conversations}
            status["cache_usage"] = round(load.cache_usage, 3)
        return status

    def run(self) -> None:
        written, written_at = None, 0.0
        while not self._closing.wait(self._interval_s):
            status, now = self.read(), time.time()
            if status == written and now - written_at < HEARTBEAT_S:
                continue
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(exist_ok=True)
                write_atomically(self._file, json.dumps({**status, "time": round(now, 1)}))
                written, written_at = status, now

    def close(self) -> None:
        """Stop, and remove the file."""
        set_load_listener(None)
        self._closing.set()
        self.join(CLOSE_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)
            self._file.parent.rmdir()  # fails while another rank's file is there
