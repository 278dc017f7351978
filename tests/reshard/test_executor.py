"""Real ranks that push: random layouts, everything byte for byte, verification, a flipped bit, a rank that dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SEEDS = tuple(str(seed) for seed in range(20))
SCRIPT = "tests/reshard/ranks_executor.py"


@pytest.fixture(scope="module")
def results(run_ranks: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return run_ranks(4, SCRIPT, *SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_engine_gets_exactly_its_shards(seed: str, results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert result[seed]["equal"] == [True] * 4, f"seed {seed}, rank {rank}"
        assert result[seed]["wrong"] == []


def test_the_first_push_and_every_third_are_verified_in_full_and_the_others_in_part(
    results: list[dict[str, Any]],
) -> None:
    counted = [result[seed]["verified"] for result in results for seed in SEEDS]
    for first, second, third, fourth in counted:
        assert first[0] == first[1] > 0
        assert fourth[0] == fourth[1]
        assert second[0] + third[0] < 2 * second[1]
    assert sum(second[0] for _, second, _, _ in counted) > 0


def test_several_rounds_were_needed(results: list[dict[str, Any]]) -> None:
    assert max(results[0][seed]["rounds"] for seed in SEEDS) > 10
