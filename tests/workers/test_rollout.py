"""The order in which a rollout worker wakes its engine."""

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
