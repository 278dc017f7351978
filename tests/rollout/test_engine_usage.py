"""`EngineUsage`: sums over reads and engines, and their metrics."""

from __future__ import annotations

import pytest

from megarl.engine.engine_protocol import EngineLoad
from megarl.rollout.cache_budget import UNLIMITED
from megarl.rollout.engine_usage import WIDTH, EngineUsage


def test_metrics_are_means_over_reads_of_all_engines() -> None:
    first = EngineUsage().add_load(EngineLoad(4, 2, 0.5, 1000), 1, UNLIMITED)
    first = first.add_load(EngineLoad(2, 0, 0.9, 1000), 3, 600.0).add_response(True, True, 2)
    second = EngineUsage().add_load(EngineLoad(6, 1, 0.1, 1000), 2, UNLIMITED).add_response(True, False, 0)
    rows = [first.to_row(), second.add_response(False, False, 1).to_row()]
    assert all(len(row) == WIDTH for row in rows)
    assert EngineUsage.of_rows(rows).metrics == pytest.approx(
        {
            "engine/running_requests": 4,
            "engine/waiting_requests": 1,
            "engine/waiting_conversations": 2,
            "engine/cache_usage_mean": 0.5,
            "engine/cache_usage_max": 0.9,
            "engine/cache_budget": 0.6,
            "engine/evicted_frac": 0.5,
            "engine/retractions": 3,
        }
    )
    assert first.merge(second).num_reads == 3


def test_without_observations_there_are_no_means() -> None:
    assert EngineUsage.of_rows([]).metrics == {"engine/retractions": 0}
