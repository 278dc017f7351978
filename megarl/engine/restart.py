"""An engine that is lost is started again, in the background, by its lead."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from megarl.engine.engine_loss import EngineError, EngineLost
from megarl.engine.sglang_engine import Engine

_DYING_S = 3.0
"""For so long an engine that has failed may take to be seen dead."""


class Revival:
    """Of one engine, on each rank that has processes of it. `lost` may be told in any thread, the rest is for one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._found: EngineLost | None = None
        self._thread = ThreadPoolExecutor(1, "engine start")
        self._starting: Future[None] | None = None
        self._took = 0.0

    @property
    def under_way(self) -> bool:
        """Whether it is being started, or was and has not been waited for."""
        return self._starting is not None

    def lost(self, found: EngineLost) -> None:
        """It is: begin to start it again, where all of its processes are this rank's. Whoever looks now and then may
        say so of one that was started again since, and has long been there."""
        with self._lock:
            of_before = found.start and found.start != self.engine.starts
            if self._found is not None or self._starting is not None or of_before:
                return
            self._found = found
            if self.engine.nnodes == 1:
                self._start()

    def look(self) -> None:
        """See whether it is there, which nobody has done for a while."""
        with self._lock:
            if self._found is None and self._starting is None:
                try:
                    self.engine.check_runs()
                except EngineLost as lost:
                    self._found = lost
                    if self.engine.nnodes == 1:
                        self._start()

    def is_lost(self, error: EngineError) -> bool:
        """Whether the engine that failed by this is one to start again; that is begun then."""
        until = time.monotonic() + _DYING_S
        while not isinstance(error, EngineLost) and time.monotonic() < until:
            try:
                self.engine.check_runs()
                time.sleep(0.1)
            except EngineLost as lost:
                error = lost
        if isinstance(error, EngineLost):
            self.lost(error)
        return isinstance(error, EngineLost)

    def found(self) -> EngineLost | None:
        """What it was lost by, once."""
        with self._lock:
            found, self._found = self._found, None
            return found

    def begin(self) -> None:
        """Start it again, where that has not begun by itself: others have found that it is lost."""
        with self._lock:
            if self._starting is None:
                self._start()

    def wait(self) -> float:
        """Seconds that it took to be there again, 0 where it was never away; `found` says what it is lost by where it
        did not start."""
        starting = self._starting
        if starting is None:
            return 0.0
        failed = starting.exception()
        with self._lock:
            self._starting = None
            if failed is not None:
                self._found = EngineLost("did not start again", str(failed))
        return self._took

    def close(self) -> None:
        """End the engine, and what starts it."""
        self.engine.shutdown()
        self._thread.shutdown()
        self.engine.shutdown()

    def _start(self) -> None:
        began = time.monotonic()

        def run() -> None:
            try:
                self.engine.restart()
                self.engine.wait_ready()
            finally:
                self._took = time.monotonic() - began

        self._starting = self._thread.submit(run)
