"""When an engine is found lost: its process gone, or no sign of life while it is asked for something."""

from __future__ import annotations

import asyncio
import time

import pytest

from megarl.engine import sglang_engine
from megarl.engine.engine_protocol import EngineLost
from megarl.engine.sglang_engine import watch


class Played:
    """An engine, and its client. lives: seconds that its process does. answers: whether one is given now and then;
    signs: what is said where its health is asked for, None for nothing at all."""

    def __init__(
        self,
        lives: float = 60.0,
        answers: bool = False,
        signs: bool | None = None,
        asking: int = 1,
        holds: bool = False,
    ) -> None:
        self._closing, self._answers, self._signs = time.monotonic() + lives, answers, signs
        self.num_pending, self.is_paused, self.looks = asking, holds, 0
        self._began = time.monotonic()

    @property
    def last_response_time(self) -> float:
        return time.monotonic() if self._answers else self._began

    def check_running(self, start_number: int = 0) -> None:
        assert start_number == 3
        if time.monotonic() > self._closing:
            raise EngineLost("died", "engine 0 is not running")

    def hang_error(self, seconds: float) -> EngineLost:
        return EngineLost("hangs", "engine 0 sent no heartbeat", seconds)

    async def is_alive(self, seconds: float) -> bool:
        self.looks += 1
        if self._signs is None:
            await asyncio.sleep(3600)
        return bool(self._signs)


def found(engine: Played, seconds: float = 1.0) -> EngineLost | None:
    async def run() -> EngineLost | None:
        try:
            async with asyncio.timeout(seconds):
                await watch(engine, engine, 0.2, 3)  # type: ignore[arg-type]
        except EngineLost as lost:
            return lost
        except TimeoutError:
            return None

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_engine, "_WATCH_POLL_S", 0.01)
    monkeypatch.setattr(sglang_engine, "_SILENCE_S", 0.05)


def test_an_engine_that_dies_is_lost() -> None:
    lost = found(Played(lives=0.1, answers=True))
    assert lost is not None and lost.fault == "died" and 0 <= lost.detection_delay < 1


@pytest.mark.parametrize("signs", [None, False])
def test_one_that_gives_no_sign_while_it_is_asked_is_lost(signs: bool | None) -> None:
    lost = found(Played(signs=signs), seconds=30.0)
    assert lost is not None and lost.fault == "hangs" and lost.detection_delay > 0.2


@pytest.mark.parametrize(
    "engine", [{"answers": True}, {"signs": True}, {"asking": 0}, {"holds": True}], ids=lambda item: next(iter(item))
)
def test_one_that_answers_or_is_healthy_or_is_asked_for_nothing_is_not(engine: dict[str, bool]) -> None:
    played = Played(**engine)  # type: ignore[arg-type]
    assert found(played) is None
    assert bool(played.looks) is ("signs" in engine)
