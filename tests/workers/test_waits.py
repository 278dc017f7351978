"""Ranks that wait for an engine wait as long as it may take, and no longer than there is something to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found(run_ranks: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    """What both ranks saw; a wait for what never comes would run into the limit."""
    first, second = run_ranks(2, "tests/workers/ranks_waits.py", timeout=180.0)
    assert first.pop("gone", False), "a peer that died was not noticed"
    assert first == second
    return first


def test_generation_may_take_longer_than_a_collective(found: dict[str, Any]) -> None:
    assert found["slow"] == [0]


def test_an_engine_that_is_gone_ends_the_generation_of_all(found: dict[str, Any]) -> None:
    assert found["fails"] == "engine 1 is not running; the last lines of its log"


def test_all_ranks_count_the_aborted_of_all_engines(found: dict[str, Any]) -> None:
    assert found["allowed"] == [0, 0, 0, 0]
    assert found["too many"].startswith("6 of 8 rollouts were aborted, more than rollout.max_aborted=0.5 allows: 4 x l")
