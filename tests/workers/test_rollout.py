"""The rollout worker and its engine: startup check of weights, order of calls around a weight sync, seeds; and aborted
rollouts in other workers."""

from __future__ import annotations

from typing import Any


def test_kv_cache_is_resumed_between_weight_sync_and_generation(units: dict[str, Any]) -> None:
    assert units["engine_calls"] == [
        "generate",
        "/flush_cache",
        "/release_memory_occupation weights kv_cache cuda_graph",
        "/resume_memory_occupation weights",
        "/begin_weight_update",
        "push",
        "/end_weight_update",
        "/flush_cache",
        "/update_weight_version",
        "/resume_memory_occupation kv_cache cuda_graph",
        "generate",
    ]


def test_generations_of_a_step_have_distinct_groups_and_seeds(units: dict[str, Any]) -> None:
    """Greedy responses have no seed and are numbered like their prompts; evaluations and steps number from 0."""
    seeds, firsts, greedy = zip(*units["generation_numbers"], strict=True)
    assert firsts == (0, 0, 3, 0, 0, 0) and greedy == (True, False, False, True, False, False)
    assert seeds[0] == seeds[4] == seeds[5] - 1


def test_mismatched_engine_is_detected_before_training(units: dict[str, Any]) -> None:
    result = units["weight_checks"]
    w13 = "model.layers.0.mlp.experts.w13_weight"
    assert result["correct"]["problem"] == ""
    assert f"the engines at their start: {w13} has shape" in result["halved"]["problem"]
    assert "model.layers.0.mlp.experts has the rows of up before those of gate" in result["swapped"]["problem"]
    assert "moe_runner_backend" in result["swapped"]["problem"]
    assert [result[name]["usable"] for name in ("correct", "halved", "swapped")] == [True, False, False]


def test_checked_engine_keeps_its_weights(units: dict[str, Any]) -> None:
    assert units["weight_checks"]["correct"]["calls"] == [
        "/model_info",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/flush_cache",
        "/update_weight_version 0",
    ]


def test_empty_batch_has_empty_outputs(units: dict[str, Any]) -> None:
    assert units["empty_batch"] == {"logprobs": [0], "values": [0]}


def test_aborted_rollouts_are_not_scored(units: dict[str, Any]) -> None:
    assert units["aborted_rewards"] == {"scored": [0, 2], "rewards": [1.0, 0.0, 1.0, 0.0], "order": [0, 1, 2, 3]}
