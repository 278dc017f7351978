"""What becomes of an engine that can generate no more: how that is called, and how it is told from a bad request."""

from __future__ import annotations

import asyncio
import time
from typing import Literal, NoReturn, Protocol

Fault = Literal["died", "hangs", "did not start again"]

_LOOK_S = 1.0
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
        self.fault, self.unnoticed, self.start = fault, unnoticed, start


class Asked(Protocol):
    """Whoever asks the engine: a `Client`."""

    asking: int
    """Answers that it waits for."""
    heard: float
    """When the last one came, in time.monotonic's seconds."""

    async def sign(self, seconds: float) -> bool:
        """Whether the engine gives a sign of life within so many seconds."""
        ...


class Watched(Protocol):
    """An `Engine`."""

    @property
    def holds(self) -> bool:
        """Whether it was told to stop at the next token."""
        ...

    def check_runs(self, start: int = 0) -> None:
        """Raise EngineLost where it is gone, or was started again after this start."""
        ...

    def hangs(self, seconds: float) -> EngineLost:
        """What is said where it gave no sign of life for so long."""
        ...


async def watch(engine: Watched, asked: Asked, limit: float, start: int = 0) -> NoReturn:
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
                engine.check_runs(start)
            except EngineLost as lost:
                lost.unnoticed = max(0.0, now - max(alive, asked.heard))
                raise
            alive = now
            if not asked.asking or engine.holds:
                seen = now
            seen = max(seen, asked.heard)
            if sign is not None and sign.done():
                seen, sign = max(seen, began) if sign.result() else seen, None
            if now - seen > limit:
                raise engine.hangs(now - seen)
            if sign is None and now - seen > min(_SILENCE_S, limit / 4):
                began, sign = now, asyncio.create_task(asked.sign(limit))
            await asyncio.sleep(_LOOK_S)
    finally:
        if sign is not None:
            sign.cancel()
            await asyncio.wait([sign])
