"""`Clock`: phases become time metrics and spans; spans of other threads are recorded without a metric."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.observe import clock as module
from megarl.observe.clock import DATA, WAIT, Clock, Span

pytestmark = pytest.mark.alone


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake_time = FakeTime()
    monkeypatch.setattr(module, "time", fake_time)
    monkeypatch.setattr(module, "_EPOCH_OFFSET_S", 1000.0)
    return fake_time


def test_phases_become_metrics_and_spans(time: FakeTime) -> None:
    phases: list[str] = []
    clock = Clock(phases.append)
    for seconds in (2.0, 3.0):
        with clock.phase("actor_update", "actor"):
            time.now += seconds
    with clock.phase("reward"), clock.span("inside", WAIT):
        time.now += 1.0
    time.now += 0.5
    assert clock.lap(7) == {"time/actor_update": 5.0, "time/reward": 1.0, "time/step": 6.5}
    assert phases == ["actor_update", "actor_update", "reward"]
    assert clock.drain_spans() == [
        Span("actor_update", "actor", "main", 1100.0, 1102.0),
        Span("actor_update", "actor", "main", 1102.0, 1105.0),
        Span("inside", WAIT, "main", 1105.0, 1106.0),
        Span("reward", "rank", "main", 1105.0, 1106.0),
        Span("step 7", "step", "main", 1100.0, 1106.5),
    ]
    assert clock.drain_spans() == []
    assert clock.lap() == {"time/step": 0.0}
    assert clock.drain_spans() == []


def test_spans_of_other_threads_are_recorded_without_a_metric(time: FakeTime) -> None:
    clock = Clock()

    def generate() -> None:
        with clock.span("generation of step 1", "rollout", (2, 3)):
            time.now += 4.0

    with ThreadPoolExecutor(1, thread_name_prefix="generation") as pool:
        pool.submit(generate).result()
    assert clock.drain_spans() == [Span("generation of step 1", "rollout", "generation", 1100.0, 1104.0, (2, 3))]
    assert clock.lap() == {"time/step": 4.0}


def test_exception_closes_the_span(time: FakeTime) -> None:
    clock = Clock()
    with pytest.raises(ValueError), clock.phase("load"):
        time.now += 1.0
        raise ValueError
    assert clock.drain_spans() == [Span("load", "rank", "main", 1100.0, 1101.0)]


def test_drops_short_waits_but_keeps_short_work(time: FakeTime) -> None:
    clock = Clock()
    for category in (WAIT, DATA, "actor"):
        with clock.span("short", category):
            time.now += 0.0004
    assert [span.category for span in clock.drain_spans()] == ["actor"]


def test_keeps_spans_of_concurrent_threads() -> None:
    clock = Clock()

    def record_spans(_: int) -> None:
        for _ in range(500):
            with clock.span("x", "actor"):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(record_spans, range(4)))
    assert len(clock.drain_spans()) == 2000
