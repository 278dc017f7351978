"""Restart a lost engine in the background, on its lead rank."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from megarl.engine.engine_loss import EngineError, EngineLost
from megarl.engine.sglang_engine import Engine

_DEATH_CHECK_S = 3.0
"""How long a failed engine may take to be recognized as dead."""


class EngineRestart:
    """Restarts one engine, on each rank that has processes of it. `report_lost` may be called from any thread, all else
    from one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._error: EngineLost | None = None
        self._thread = ThreadPoolExecutor(1, "engine start")
        self._start_future: Future[None] | None = None
        self._start_seconds = 0.0

    @property
    def is_pending(self) -> bool:
        """True from the start of a restart until `wait`."""
        return self._start_future is not None

    def report_lost(self, error: EngineLost) -> None:
        """Record that the engine is lost, and start it again if all of its processes belong to this rank.

        A watcher that polls rarely may report a start that has since been replaced; such reports are ignored.
        """
        with self._lock:
            is_stale = error.start_number and error.start_number != self.engine.start_number
            if self._error is not None or self._start_future is not None or is_stale:
                return
            self._error = error
            if self.engine.nnodes == 1:
                self._submit_start()

    def check(self) -> None:
        """Check that the engine runs, after a time in which nobody has watched it."""
        with self._lock:
            if self._error is None and self._start_future is None:
                try:
                    self.engine.check_running()
                except EngineLost as lost:
                    self._error = lost
                    if self.engine.nnodes == 1:
                        self._submit_start()

    def restart_if_lost(self, error: EngineError) -> bool:
        """Return whether the engine that failed with `error` is lost. If so, its restart begins."""
        until = time.monotonic() + _DEATH_CHECK_S
        while not isinstance(error, EngineLost) and time.monotonic() < until:
            try:
                self.engine.check_running()
                time.sleep(0.1)
            except EngineLost as lost:
                error = lost
        if isinstance(error, EngineLost):
            self.report_lost(error)
        return isinstance(error, EngineLost)

    def pop_error(self) -> EngineLost | None:
        """Return the error that the engine was lost by, and clear it."""
        with self._lock:
            error, self._error = self._error, None
            return error

    def ensure_started(self) -> None:
        """Begin the restart if it has not begun, because other ranks have found the engine lost."""
        with self._lock:
            if self._start_future is None:
                self._submit_start()

    def wait(self) -> float:
        """Wait for the restart and return the seconds it took, 0 if there was none. If it failed, `pop_error` returns
        the error."""
        future = self._start_future
        if future is None:
            return 0.0
        failed = future.exception()
        with self._lock:
            self._start_future = None
            if failed is not None:
                self._error = EngineLost("did not start again", str(failed))
        return self._start_seconds

    def close(self) -> None:
        """Shut the engine down, and the thread that restarts it."""
        self.engine.shutdown()
        self._thread.shutdown()
        self.engine.shutdown()

    def _submit_start(self) -> None:
        began = time.monotonic()

        def run() -> None:
            try:
                self.engine.restart()
                self.engine.wait_ready()
            finally:
                self._start_seconds = time.monotonic() - began

        self._start_future = self._thread.submit(run)
