"""An engine that is lost is started again, in the background, by its lead."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from megarl.engine.engine_loss import EngineError, EngineLost
from megarl.engine.sglang_engine import Engine

_DEATH_CHECK_S = 3.0
"""For so long an engine that has failed may take to be seen dead."""


class EngineRestart:
    """Of one engine, on each rank that has processes of it. `lost` may be told in any thread, the rest is for one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._error: EngineLost | None = None
        self._thread = ThreadPoolExecutor(1, "engine start")
        self._start_future: Future[None] | None = None
        self._start_seconds = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether it is being started, or was and has not been waited for."""
        return self._start_future is not None

    def report_lost(self, found: EngineLost) -> None:
        """It is: begin to start it again, where all of its processes are this rank's. Whoever looks now and then may
        say so of one that was started again since, and has long been there."""
        with self._lock:
            of_before = found.start_number and found.start_number != self.engine.start_number
            if self._error is not None or self._start_future is not None or of_before:
                return
            self._error = found
            if self.engine.nnodes == 1:
                self._submit_start()

    def check(self) -> None:
        """See whether it is there, which nobody has done for a while."""
        with self._lock:
            if self._error is None and self._start_future is None:
                try:
                    self.engine.check_running()
                except EngineLost as lost:
                    self._error = lost
                    if self.engine.nnodes == 1:
                        self._submit_start()

    def restart_if_lost(self, error: EngineError) -> bool:
        """Whether the engine that failed by this is one to start again; that is begun then."""
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
        """What it was lost by, once."""
        with self._lock:
            found, self._error = self._error, None
            return found

    def ensure_started(self) -> None:
        """Start it again, where that has not begun by itself: others have found that it is lost."""
        with self._lock:
            if self._start_future is None:
                self._submit_start()

    def wait(self) -> float:
        """Seconds that it took to be there again, 0 where it was never away; `found` says what it is lost by where it
        did not start."""
        starting = self._start_future
        if starting is None:
            return 0.0
        failed = starting.exception()
        with self._lock:
            self._start_future = None
            if failed is not None:
                self._error = EngineLost("did not start again", str(failed))
        return self._start_seconds

    def close(self) -> None:
        """End the engine, and what starts it."""
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
