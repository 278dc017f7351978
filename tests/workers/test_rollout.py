"""The order in which a rollout worker wakes its engine, and what becomes of aborted rollouts in other workers."""

from __future__ import annotations

from typing import Any


def test_the_kv_cache_comes_back_after_the_push_and_before_generating(units: dict[str, Any]) -> None:
    assert units["waking"] == [
        "generates",
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


def test_nothing_at_all_has_log_probs_and_values_of_no_token(units: dict[str, Any]) -> None:
    assert units["nothing"] == {"logprobs": [0], "entropy": [0], "values": [0]}


def test_aborted_rollouts_are_shown_to_no_reward(units: dict[str, Any]) -> None:
    assert units["spared"] == {"seen": [0, 2], "rewards": [1.0, 0.0, 1.0, 0.0], "order": [0, 1, 2, 3]}
