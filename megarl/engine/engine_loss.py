"""What becomes of an engine that can generate no more: how that is called, and how it is told from a bad request."""

from __future__ import annotations

import asyncio
import time
from typing import Literal, NoReturn, Protocol

Fault = Literal["died", "hangs", "did not start again"]

_POLL_S = 1.0
"""How often it is asked whether the engine's process is there."""
_SILENCE_S = 5.0
"""After so long without an answer, while some are asked for, it is asked for a sign of life."""


class EngineError(RuntimeError):
    """The engine did not start, died, or refused a push. The message ends with its last log lines."""


class EngineLost(EngineError):
    """An engine that has to be started again; what it had under way is lost. unnoticed: seconds from its last sign of
    life until this was found, so the longest that it may have been gone. start: which start of it is lost; 0 where that
    is not known."""

    def __init__(self, fault: Fault, text: str, unnoticed: float = 0.0, start: int = 0) -> None:
        super().__init__(text)
        self.fault, self.detection_delay, self.start_number = fault, unnoticed, start


class WatchedClient(Protocol):
    """Whoever asks the engine: a `Client`."""

    num_pending: int
    """Answers that it waits for."""
    last_response_time: float
    """When the last one came, in time.monotonic's seconds."""

    async def is_alive(self, seconds: float) -> bool:
        """Whether the engine gives a sign of life within so many seconds."""
        ...


class WatchedEngine(Protocol):
    """An `Engine`."""

    @property
    def is_paused(self) -> bool:
        """Whether it was told to stop at the next token."""
        ...

    def check_running(self, start: int = 0) -> None:
        """Raise EngineLost where it is gone, or was started again after this start."""
        ...

    def hang_error(self, seconds: float) -> EngineLost:
        """What is said where it gave no sign of life for so long."""
        ...


async def watch(engine: WatchedEngine, asked: WatchedClient, limit: float, start: int = 0) -> NoReturn:
    """Look after an engine until it is lost; EngineLost says why. limit: seconds that it may go without a sign of life
    while it is asked for something. start: as of `check_runs`.

    Signs are an answer, and SGLang's own look at its health, which is good when its scheduler has finished a batch
    since it was asked: with work under way that is a token, else one token that it makes for that.
    """
    seen = alive = time.monotonic()
    sign: asyncio.Task[bool] | None = None
    began = seen
    try:
        while True:
            now = time.monotonic()
            try:
                engine.check_running(start)
            except EngineLost as lost:
                lost.detection_delay = max(0.0, now - max(alive, asked.last_response_time))
                raise
            alive = now
            if not asked.num_pending or engine.is_paused:
                seen = now
            seen = max(seen, asked.last_response_time)
            if sign is not None and sign.done():
                seen, sign = max(seen, began) if sign.result() else seen, None
            if now - seen > limit:
                raise engine.hang_error(now - seen)
            if sign is None and now - seen > min(_SILENCE_S, limit / 4):
                began, sign = now, asyncio.create_task(asked.is_alive(limit))
            await asyncio.sleep(_POLL_S)
    finally:
        if sign is not None:
            sign.cancel()
            await asyncio.wait([sign])
