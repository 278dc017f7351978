"""Patches of Megatron-Core that are on for every device."""

from __future__ import annotations

from typing import Any


def test_packed_sequences_are_rotated_as_if_alone(units: dict[str, Any]) -> None:
    result = units["packed_rope"]
    assert len(result) == 6 and all(result.values()), result


def test_a_recomputed_output_needs_no_compiler(units: dict[str, Any]) -> None:
    """An output is freed after the forward pass, and its views have the recomputed values in the backward pass."""
    result = units["recomputed_output"]
    assert result["sizes"] == [192, 0, 192]
    assert result["values"] and result["gradients"] == [True] * 4
