"""Waits of ranks for an engine: as long as generation takes, but not after a failure or loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def results(run_ranks: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    """Return both ranks' results; a wait that never ends would hit the timeout."""
    first, second = run_ranks(2, "tests/workers/ranks_engine_waits.py", timeout=180.0)
    assert first.pop("peer died", False), "a peer that died was not noticed"
    assert first == second
    return first


def test_generation_may_exceed_the_collective_timeout(results: dict[str, Any]) -> None:
    assert results["slow"] == [0]


def test_failure_of_one_engines_tools_ends_generation_on_all_ranks(results: dict[str, Any]) -> None:
    assert results["fails"] == "the processes of the tools are gone"


def test_other_engine_regenerates_the_groups_of_a_lost_one(results: dict[str, Any]) -> None:
    metrics = {"rollout/engine_restarts": 1.0, "rollout/lost_samples": 3.0, "rollout/regenerated_samples": 3.0}
    assert results["lost one of two"] == {"seeds": [0, 1], "available": True, "metrics": metrics, "restarting": [1]}


def test_only_engine_restarts_and_regenerates_its_groups(results: dict[str, Any]) -> None:
    metrics = {"rollout/engine_restarts": 1.0, "rollout/lost_samples": 3.0, "rollout/regenerated_samples": 3.0}
    assert results["lost the only one"] == {"seeds": [0, 1], "available": True, "metrics": metrics, "restarting": []}


def test_aborted_rollouts_are_counted_over_all_engines(results: dict[str, Any]) -> None:
    assert results["allowed"] == [0, 0, 0, 0]
    assert results["too many"].startswith(
        "6 of 8 rollouts were aborted, more than rollout.max_aborted_frac=0.5 allows: 4 x l"
    )
