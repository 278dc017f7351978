"""Vocabulary parallel log-probs and entropies compared with log_softmax in fp64."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("kind", ["plain", "capped"])
def test_logprobs_and_entropy_match_fp64(units: dict[str, Any], kind: str) -> None:
    """With temperature and padding; test_model.py checks a sharded vocabulary in every layout with tp=2."""
    result = units["logprobs"][kind]
    assert result["logprobs"] < 5e-6
    assert result["entropy"] < 5e-6
    assert result["gradient"] < 5e-6
    assert result["padding"] == 0.0
    assert result["rows at once"] == 4
    assert result["same without entropy"]


@pytest.mark.parametrize("kind", ["plain", "capped"])
def test_sampling_mask_logprobs_match_masked_fp64(units: dict[str, Any], kind: str) -> None:
    """test_model.py checks a sharded vocabulary in every layout with tp=2, and layouts against transformers."""
    result = units["masked_logprobs"][kind]
    assert result["logprobs"] < 5e-6
    assert result["entropy"] < 5e-6
    assert result["gradient"] < 5e-6
    assert result["without entropy"] == 0.0
    assert result["targets of a shard"] == [False, True]
    assert result["single candidate"] == 0.0  # a single candidate has probability 1 and no gradient
    assert result["padding"] == 0.0
    assert 0 < result["gathered elements"] <= 13 * 6  # as many elements as the logits of 4 tokens, or one token
