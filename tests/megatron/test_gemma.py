"""Attention with a soft cap (Gemma 2) or sinks (gpt-oss), and Gemma 2's scaled embeddings."""

from __future__ import annotations

from typing import Any


def test_capped_attention_and_gradients_match_fp64(units: dict[str, Any]) -> None:
    result = units["capped_attention"]
    assert len(result) == 4
    assert max(result.values()) < 5e-6, result


def test_attention_with_sinks_and_its_gradients_match_fp64(units: dict[str, Any]) -> None:
    result = units["sink_attention"]
    assert len(result) == 4
    assert max(result.values()) < 5e-6, result


def test_embedding_scale_is_rounded_to_model_dtype(units: dict[str, Any]) -> None:
    assert units["scaled_embedding"] == 0.0
