"""Ranks that wait for an engine wait as long as it may take, and no longer than there is something to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found(run_ranks: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    """What both ranks saw; a wait for what never comes would run into the limit."""
    first, second = run_ranks(2, "tests/workers/ranks_engine_waits.py", timeout=180.0)
    assert first.pop("gone", False), "a peer that died was not noticed"
    assert first == second
    return first


def test_generation_may_take_longer_than_a_collective(found: dict[str, Any]) -> None:
    assert found["slow"] == [0]


def test_what_fails_beside_an_engine_ends_the_generation_of_all(found: dict[str, Any]) -> None:
    assert found["fails"] == "the processes of the tools are gone"


def test_what_an_engine_had_when_it_was_lost_is_generated_by_the_other(found: dict[str, Any]) -> None:
    figures = {"rollout/engine_restarts": 1.0, "rollout/lost_samples": 3.0, "rollout/regenerated_samples": 3.0}
    assert found["one of two"] == {"seeds": [0, 1], "there": True, "figures": figures, "away": [1]}


def test_the_only_engine_is_waited_for_and_does_it_itself(found: dict[str, Any]) -> None:
    figures = {"rollout/engine_restarts": 1.0, "rollout/lost_samples": 3.0, "rollout/regenerated_samples": 3.0}
    assert found["the only one"] == {"seeds": [0, 1], "there": True, "figures": figures, "away": []}


def test_all_ranks_count_the_aborted_of_all_engines(found: dict[str, Any]) -> None:
    assert found["allowed"] == [0, 0, 0, 0]
    assert found["too many"].startswith(
        "6 of 8 rollouts were aborted, more than rollout.max_aborted_frac=0.5 allows: 4 x l"
    )
