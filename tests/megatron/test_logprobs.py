from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("kind", ["plain", "capped"])
def test_logprobs_and_entropy_against_log_softmax_in_fp64(units: dict[str, Any], kind: str) -> None:
    """With temperature and padded columns; the same cut over two ranks is part of every TP2 layout in test_model.py."""
    result = units["logprobs"][kind]
    assert result["logprobs"] < 5e-6
    assert result["entropy"] < 5e-6
    assert result["gradient"] < 5e-6
    assert result["padding"] == 0.0
    assert result["at once"] == 4
    assert result["the same without entropy"]


@pytest.mark.parametrize("kind", ["plain", "capped"])
def test_over_what_could_have_been_sampled_against_masked_logits_in_fp64(units: dict[str, Any], kind: str) -> None:
    """Over two ranks it is part of every TP2 layout in test_model.py, and so are layouts against transformers."""
    result = units["cut_logprobs"][kind]
    assert result["logprobs"] < 5e-6
    assert result["entropy"] < 5e-6
    assert result["gradient"] < 5e-6
    assert result["without entropy"] == 0.0
    assert result["of one"] == 0.0  # it had to be drawn: nothing is learned of it
    assert result["padding"] == 0.0
    assert 0 < result["looked up"] <= 13 * 6  # as many numbers as the logits of 4 tokens, and one token at least
