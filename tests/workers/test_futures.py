"""Futures and update metrics communicate only in `wait` and `sync`."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.parallel import ranks
from megarl.workers.futures import Future, UpdateMetrics, sync_metrics

pytestmark = pytest.mark.alone


def test_future_receives_its_value_once_on_wait() -> None:
    received: list[int] = []

    def receive() -> int:
        received.append(1)
        return 7

    future = Future(receive)
    assert "pending" in repr(future) and not future.is_done and not received
    assert future.wait() == future.wait() == 7 and future.is_done and received == [1]
    assert Future.completed(None).is_done


def test_sync_metrics_broadcasts_once_per_source(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, int]] = []

    def broadcast(value: Any, source: int) -> Any:
        sent.append((value, source))
        return [{"loss": 10.0 * source + i} for i in range(len(value))]

    monkeypatch.setattr(ranks, "broadcast_object", broadcast)
    local_metrics = UpdateMetrics({"loss": 0.5})
    updates = [UpdateMetrics(None, 4), local_metrics, UpdateMetrics(None, 2), UpdateMetrics({"loss": 41.0}, 4)]
    assert "source=4" in repr(updates) and not sent
    assert sync_metrics(updates) == [{"loss": 40.0}, {"loss": 0.5}, {"loss": 20.0}, {"loss": 41.0}]
    assert sent == [([None, {"loss": 41.0}], 4), ([None], 2)]
    assert local_metrics.sync() == {"loss": 0.5} and len(sent) == 2


def test_update_metrics_are_not_a_mapping() -> None:
    with pytest.raises(TypeError):
        dict(UpdateMetrics({"loss": 0.5}))  # type: ignore[call-overload]
