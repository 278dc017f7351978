"""Megatron options from a family's table compute what transformers computes from the same config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_rotary_softmax_scale_and_routing_agree_with_transformers(
    run_ranks: Callable[..., list[dict[str, Any]]],
) -> None:
    (result,) = run_ranks(1, "tests/models/ranks_formulas.py")
    assert len(result["rotaries"]) == 8
    for rotated, softmax_scale in result["rotaries"]:
        assert rotated < 1e-5 and softmax_scale < 1e-12
    assert len(result["routings"]) == 8
    assert all(difference < 1e-5 for difference in result["routings"].values()), result["routings"]
