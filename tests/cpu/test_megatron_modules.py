"""The packed attention of Megatron-Core on the CPU."""

from __future__ import annotations

from typing import Any


def test_packed_attention_separates_sequences(units: dict[str, Any]) -> None:
    """Output and gradients match fp64, and each sequence equals its result alone bitwise, for all lengths."""
    assert units["attention"]["difference"] < 1e-5
    assert units["attention"]["gradient"] < 1e-5
    assert units["attention"]["per sequence"] == 0.0


def test_packed_attention_cost_is_quadratic_per_sequence(units: dict[str, Any]) -> None:
    """37 sequences of 80 tokens take about 10 ms; one mask over all 2960 tokens takes a hundred times as long."""
    assert units["attention"]["seconds"] < 0.5
