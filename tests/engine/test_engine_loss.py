"""When `watch` reports an engine as lost: its process died, or it is silent with pending requests."""

from __future__ import annotations

import asyncio
import time

import pytest

from megarl.engine import engine_restart
from megarl.engine.engine_protocol import EngineLost
from megarl.engine.engine_restart import watch


class FakeEngine:
    """An engine and its client. dies_after: seconds until its process dies. responds: whether responses keep arriving.
    healthy: the result of health checks, None if they hang."""

    def __init__(
        self,
        dies_after: float = 60.0,
        responds: bool = False,
        healthy: bool | None = None,
        num_pending: int = 1,
        is_paused: bool = False,
        is_asleep: bool = False,
    ) -> None:
        self.is_asleep = is_asleep
        self._dies_at, self._responds, self._healthy = time.monotonic() + dies_after, responds, healthy
        self.num_pending, self.is_paused, self.health_checks = num_pending, is_paused, 0
        self._started = time.monotonic()

    @property
    def last_response_time(self) -> float:
        return time.monotonic() if self._responds else self._started

    def check_running(self, start_number: int = 0) -> None:
        assert start_number == 3
        if time.monotonic() > self._dies_at:
            raise EngineLost("died", "engine 0 is not running")

    def hang_error(self, seconds: float) -> EngineLost:
        return EngineLost("hangs", "engine 0 sent no heartbeat", seconds)

    async def is_alive(self, seconds: float) -> bool:
        self.health_checks += 1
        if self._healthy is None:
            await asyncio.sleep(3600)
        return bool(self._healthy)


def watch_engine(engine: FakeEngine, seconds: float = 1.0) -> EngineLost | None:
    async def run() -> EngineLost | None:
        try:
            async with asyncio.timeout(seconds):
                await watch(engine, engine, 0.2, 3)  # type: ignore[arg-type]
        except EngineLost as failure:
            return failure
        except TimeoutError:
            return None

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_restart, "_WATCH_POLL_S", 0.01)
    monkeypatch.setattr(engine_restart, "_SILENCE_S", 0.05)


def test_dead_engine_is_lost() -> None:
    failure = watch_engine(FakeEngine(dies_after=0.1, responds=True))
    assert failure is not None and failure.fault == "died" and 0 <= failure.detection_delay < 1


def test_engine_that_dies_asleep_is_noticed_later() -> None:
    """Its device is in use then, so that it could not start again."""
    assert watch_engine(FakeEngine(dies_after=0.1, num_pending=0, is_asleep=True)) is None


@pytest.mark.parametrize("healthy", [None, False])
def test_silent_engine_with_pending_requests_is_lost(healthy: bool | None) -> None:
    failure = watch_engine(FakeEngine(healthy=healthy), seconds=30.0)
    assert failure is not None and failure.fault == "hangs" and failure.detection_delay > 0.2


@pytest.mark.parametrize(
    "engine",
    [{"responds": True}, {"healthy": True}, {"num_pending": 0}, {"is_paused": True}],
    ids=lambda item: next(iter(item)),
)
def test_responding_healthy_idle_or_paused_engine_is_not_lost(engine: dict[str, bool]) -> None:
    fake = FakeEngine(**engine)  # type: ignore[arg-type]
    assert watch_engine(fake) is None
    assert bool(fake.health_checks) is ("healthy" in engine)
