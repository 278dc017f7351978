"""Memory that runs out on one of two ranks, in real Megatron models: nobody hangs, and the result is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., list[dict[str, Any]]]
SAME = 1e-6


@pytest.fixture(scope="module")
def alone(run_ranks: Run) -> list[dict[str, Any]]:
    """Each rank has a whole model; the second one's memory runs out."""
    return run_ranks(2, "tests/megatron/ranks_oom_retry.py", "dp")


def test_a_guard_that_does_nothing_changes_nothing(alone: list[dict[str, Any]]) -> None:
    assert all(result["guarded"] == 0.0 for result in alone)


@pytest.mark.parametrize("how", ["device", "host", "backward"])
def test_half_as_many_tokens_and_the_step_is_taken_again(alone: list[dict[str, Any]], how: str) -> None:
    """By an error as CUDA's allocator raises it, by a real one of the host's, and by one in the backward pass: weights,
    moments, metrics and log-probs are those of two steps that nothing has disturbed."""
    for rank, result in enumerate(alone):
        assert result[how]["gap"] <= SAME
        budget, recomputes, often = result[how]["state"]
        assert budget < 26 and not recomputes and often >= 1
        assert bool(result[how]["seen"]) == bool(rank)


def test_it_is_halved_until_it_fits(alone: list[dict[str, Any]]) -> None:
    for result in alone:
        assert result["halved again"]["gap"] <= SAME
        budget, recomputes, often = result["halved again"]["state"]
        assert budget <= 26 // 4 and not recomputes and often >= 2


def test_a_group_is_not_parted(alone: list[dict[str, Any]]) -> None:
    for result in alone:
        assert result["pairs"]["gap"] <= SAME
        assert result["pairs"]["state"][1] is False and result["pairs"]["state"][2] >= 1


def test_a_sequence_that_is_too_long_by_itself_is_recomputed(alone: list[dict[str, Any]]) -> None:
    """The micro-batches are the same, so are all bits, and what the router's losses had counted is not counted
    twice."""
    for result in alone:
        assert result["recomputed"] == {"gap": 0.0, "state": [26, True, 1]}


def test_what_was_found_out_is_in_the_checkpoint(alone: list[dict[str, Any]]) -> None:
    for result in alone:
        assert result["restored"] == [26, True, 1]
        assert result["restored recomputes"] == ["full", "uniform"]
        assert result["set anew"] == [30, False, 1]


def test_what_fits_nowhere_ends_both_ranks_in_the_same_line(alone: list[dict[str, Any]]) -> None:
    first, second = alone
    assert first["never"] == second["never"] and first["never forward"] == second["never forward"]
    for said in (first["never"], first["never forward"]):
        assert said.startswith("out of memory in a micro-batch of one sequence, of ")
        assert "of the actor" in said and "lower rollout.max_context" in said and "\n" not in said
    assert "with all layers recomputed" in first["never"]
    assert first["after all"] <= SAME  # nothing is left of it


def test_without_the_guard_it_is_an_error(alone: list[dict[str, Any]]) -> None:
    assert [result["unguarded"] for result in alone] == ["not rank 1", "OutOfMemoryError"]


@pytest.mark.parametrize("layout", ["tp", "pp", "ep"])
def test_ranks_that_compute_together_ask_for_memory_first(run_ranks: Run, layout: str) -> None:
    for result in run_ranks(2, "tests/megatron/ranks_oom_retry.py", layout):
        assert result["short"]["gap"] <= SAME
        budget, recomputes, often = result["short"]["state"]
        assert budget <= 14 and not recomputes and often >= 1
        if layout == "pp":
            assert result["in vain"].startswith(
                "out of memory in a micro-batch of one sequence, of 26 tokens (it needs"
            )
        else:
            assert result["long"]["gap"] <= SAME
            assert result["long"]["state"][1:] == [True, result["long"]["state"][2]]
            assert (
                "cannot repeat: continue with run.resume=auto and train.max_tokens_per_gpu=" in result["in the middle"]
            )
