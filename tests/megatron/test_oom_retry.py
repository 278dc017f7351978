"""Recovery from out-of-memory errors on one of two ranks, in real Megatron models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[dict[str, Any]]]
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def independent_ranks(run_ranks: RunRanks) -> list[dict[str, Any]]:
    """Results of two ranks with a whole model each, the second of which runs out of memory."""
    return run_ranks(2, "tests/megatron/ranks_oom_retry.py", "dp")


def test_idle_guard_changes_nothing(independent_ranks: list[dict[str, Any]]) -> None:
    assert all(result["guarded"] == 0.0 for result in independent_ranks)


@pytest.mark.parametrize("kind", ["device", "host", "backward"])
def test_retries_step_with_half_the_token_budget(independent_ranks: list[dict[str, Any]], kind: str) -> None:
    """Weights, moments, metrics and log-probs are those of two steps with enough memory.

    Errors are as raised by CUDA's allocator, a real one of the host's, and one in the backward pass."""
    for rank, result in enumerate(independent_ranks):
        assert result[kind]["gap"] <= TOLERANCE
        budget, recomputes, ooms = result[kind]["state"]
        assert budget < 26 and not recomputes and ooms >= 1
        assert bool(result[kind]["failures"]) == bool(rank)


def test_halves_budget_until_it_fits(independent_ranks: list[dict[str, Any]]) -> None:
    for result in independent_ranks:
        assert result["halved again"]["gap"] <= TOLERANCE
        budget, recomputes, ooms = result["halved again"]["state"]
        assert budget <= 26 // 4 and not recomputes and ooms >= 2


def test_keeps_preference_pairs_together(independent_ranks: list[dict[str, Any]]) -> None:
    for result in independent_ranks:
        assert result["pairs"]["gap"] <= TOLERANCE
        assert result["pairs"]["state"][1] is False and result["pairs"]["state"][2] >= 1


def test_recomputes_activations_of_a_long_sequence(independent_ranks: list[dict[str, Any]]) -> None:
    """Micro-batches do not change, so the step is bitwise the same, and router losses are not counted twice."""
    for result in independent_ranks:
        assert result["recomputed"] == {"gap": 0.0, "state": [26, True, 1]}


def test_checkpoint_restores_budget_and_recomputation(independent_ranks: list[dict[str, Any]]) -> None:
    for result in independent_ranks:
        assert result["restored"] == [26, True, 1]
        assert result["restored recomputes"] == ["full", "uniform"]
        assert result["restored with new config"] == [30, False, 1]


def test_unfittable_sequence_is_the_same_error_on_both_ranks(independent_ranks: list[dict[str, Any]]) -> None:
    first, second = independent_ranks
    assert first["unfittable"] == second["unfittable"] and first["unfittable forward"] == second["unfittable forward"]
    for message in (first["unfittable"], first["unfittable forward"]):
        assert message.startswith("out of memory in a micro-batch of one sequence, of ")
        assert "of the actor" in message and "lower rollout.max_context" in message and "\n" not in message
    assert "with all layers recomputed" in first["unfittable"]
    assert first["after failure"] <= TOLERANCE  # the failed step leaves no trace


def test_out_of_memory_without_guard_raises(independent_ranks: list[dict[str, Any]]) -> None:
    assert [result["unguarded"] for result in independent_ranks] == ["not rank 1", "OutOfMemoryError"]


@pytest.mark.parametrize("layout", ["tp", "pp", "ep", "dynamic"])
def test_model_parallel_ranks_reserve_memory_first(run_ranks: RunRanks, layout: str) -> None:
    for result in run_ranks(2, "tests/megatron/ranks_oom_retry.py", layout):
        assert result["short"]["gap"] <= TOLERANCE
        budget, recomputes, ooms = result["short"]["state"]
        assert budget <= 14 and not recomputes and ooms >= 1
        assert result["long"]["gap"] <= TOLERANCE
        # With dynamic CP, a micro-batch of 26 tokens has 13 on each rank.
        assert result["long"]["state"][1:] == [layout != "dynamic", result["long"]["state"][2]]
        assert result["unfittable"].startswith("out of memory in a micro-batch of one sequence, of ")
        assert " tokens (it needs" in result["unfittable"]
        if layout == "dynamic":
            before, after = result["cut"]["widths"]
            assert set(before) == set(after) == {1, 2} and len(after) > len(before)
            assert result["cut"]["gap"] <= TOLERANCE
        if layout != "pp":
            assert "cannot repeat: continue with run.resume=auto and train.max_tokens_per_gpu=" in result["unreserved"]
