"""Patches of Megatron-Core that are on for every device."""

from __future__ import annotations

from typing import Any


def test_packed_sequences_are_rotated_as_if_alone(units: dict[str, Any]) -> None:
    result = units["packed_rope"]
    assert len(result) == 6 and all(result.values()), result
