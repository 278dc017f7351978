"""Detect that an engine is lost, and start it again in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

from megarl.engine.engine_protocol import Engine, EngineClient, EngineError, EngineLost

_WATCH_POLL_S = 1.0
"""Interval between checks that the engine's process exists."""
_SILENCE_S = 5.0
"""With requests pending, ask for a sign of life after this long without a response."""
_DEATH_CHECK_S = 3.0
"""Seconds in which a failed engine must be recognized as dead."""


async def watch(engine: Engine, client: EngineClient, hang_timeout: float, start_number: int = 0) -> NoReturn:
    """Watch an engine until it is lost; raises EngineLost with the reason. While it is asleep, commands to it find out.

    hang_timeout: seconds that it may go without a sign of life while requests are pending.

    Signs of life are a response, and the engine's health check (`EngineClient.is_alive`).
    """
    last_sign = last_running = time.monotonic()
    health_check: asyncio.Task[bool] | None = None
    check_started = last_sign
    try:
        while True:
            now = time.monotonic()
            try:
                if not engine.is_asleep:  # its device is in use, so that it could not start again
                    engine.check_running(start_number)
            except EngineLost as lost:
                lost.detection_delay = max(0.0, now - max(last_running, client.last_response_time))
                raise
            last_running = now
            if not client.num_pending or engine.is_paused:
                last_sign = now
            last_sign = max(last_sign, client.last_response_time)
            if health_check is not None and health_check.done():
                last_sign, health_check = max(last_sign, check_started) if health_check.result() else last_sign, None
            if now - last_sign > hang_timeout:
                raise engine.hang_error(now - last_sign)
            if health_check is None and now - last_sign > min(_SILENCE_S, hang_timeout / 4):
                check_started, health_check = now, asyncio.create_task(client.is_alive(hang_timeout))
            await asyncio.sleep(_WATCH_POLL_S)
    finally:
        if health_check is not None:
            health_check.cancel()
            await asyncio.wait([health_check])


class EngineRestart:
    """Restarts one engine, on each rank with processes of it. Only `report_lost` may be called from any thread."""

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
        """Record that the engine is lost, and start it again if all of its processes belong to this rank."""
        with self._lock:
            # A watcher that polls rarely may report a start that has since been replaced.
            is_stale = error.start_number and error.start_number != self.engine.start_number
            if self._error is not None or self._start_future is not None or is_stale:
                return
            self._error = error
            if self.engine.nnodes == 1:
                self._submit_start()

    def check(self) -> None:
        """Check that the engine runs, after a time in which nobody has watched it."""
        if self._start_future is None:
            try:
                self.engine.check_running()
            except EngineLost as lost:
                self.report_lost(lost)

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
        """Wait for the restart; return its seconds, 0 if there was none. `pop_error` returns its error."""
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
