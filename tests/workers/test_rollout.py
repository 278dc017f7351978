"""A rollout worker and its engine: whether it holds what the model has, and the order in which it is woken; and what
becomes of aborted rollouts in other workers."""

from __future__ import annotations

from typing import Any


def test_the_kv_cache_comes_back_after_the_push_and_before_generating(units: dict[str, Any]) -> None:
    assert units["waking"] == [
        "generates",
        "/flush_cache",
        "/release_memory_occupation weights kv_cache cuda_graph",
        "/resume_memory_occupation weights",
        "/begin_weight_update",
        "is pushed to",
        "/end_weight_update",
        "/flush_cache",
        "/update_weight_version",
        "/resume_memory_occupation kv_cache cuda_graph",
        "generates",
    ]


def test_generations_of_a_step_share_no_group_and_no_seed(units: dict[str, Any]) -> None:
    """Greedy answers, which have no seed, are numbered as their prompts; an evaluation begins anew, as every step."""
    seeds, firsts, greedy = zip(*units["numbers"], strict=True)
    assert firsts == (0, 0, 3, 0, 0, 0) and greedy == (True, False, False, True, False, False)
    assert seeds[0] == seeds[4] == seeds[5] - 1


def test_an_engine_that_holds_something_else_is_found_before_anything_is_trained(units: dict[str, Any]) -> None:
    result = units["comparing"]
    w13 = "model.layers.0.mlp.experts.w13_weight"
    assert result["right"]["problem"] == ""
    assert f"the engines at their start: {w13} has shape" in result["halved"]["problem"]
    assert "model.layers.0.mlp.experts has the rows of up before those of gate" in result["swapped"]["problem"]
    assert "moe_runner_backend" in result["swapped"]["problem"]
    assert [result[name]["usable"] for name in ("right", "halved", "swapped")] == [True, False, False]


def test_an_engine_that_was_looked_at_generates_with_what_it_has(units: dict[str, Any]) -> None:
    assert units["comparing"]["right"]["calls"] == [
        "/model_info",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/flush_cache",
        "/update_weight_version 0",
    ]


def test_nothing_at_all_has_log_probs_and_values_of_no_token(units: dict[str, Any]) -> None:
    assert units["nothing"] == {"logprobs": [0], "values": [0]}


def test_aborted_rollouts_are_shown_to_no_reward(units: dict[str, Any]) -> None:
    assert units["spared"] == {"seen": [0, 2], "rewards": [1.0, 0.0, 1.0, 0.0], "order": [0, 1, 2, 3]}
