"""Vocabulary parallel log-probs and entropies compared with log_softmax in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.megatron.logprobs import iter_chunks
from megarl.types import SamplingMask


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
    assert result["single candidate"] == 0.0  # a single candidate has probability 1 and no gradient
    assert result["padding"] == 0.0
    assert 0 < result["gathered elements"] <= 13 * 6  # as many elements as the logits of 4 tokens, or one token


def test_target_just_before_a_shard_is_not_its_padding() -> None:
    """The shard of ids 4 to 7: the first token has two of its candidates, the second more, so the first is padded."""
    mask = SamplingMask.from_rows([[3, 5, 6], [4, 5, 6, 7]])
    targets = torch.tensor([3, 4])
    has_target = torch.zeros(2, dtype=torch.bool)
    for chunk in iter_chunks(targets, mask, first=4, columns=4, chunk_tokens=16, width=1):
        assert chunk.candidate_ids is not None and chunk.candidate_ids.shape == (2, 4)
        has_target[chunk.rows] = chunk.has_target
    assert has_target.tolist() == [False, True]
