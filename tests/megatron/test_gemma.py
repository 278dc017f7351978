from __future__ import annotations

from typing import Any


def test_capped_attention_and_its_gradients_are_those_of_the_formula_in_fp64(units: dict[str, Any]) -> None:
    result = units["capped_attention"]
    assert len(result) == 4
    assert max(result.values()) < 5e-6, result


def test_embeddings_are_scaled_by_what_the_scale_is_in_the_models_type(units: dict[str, Any]) -> None:
    assert units["scaled_embedding"] == 0.0
