"""The quadratic cost of attention relative to the linear cost of a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.models.flops import quadratic_cost

pytestmark = pytest.mark.alone

CONFIGS = Path(__file__).resolve().parents[2] / "configs/models"
TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize("tied", [False, True])
def test_quadratic_cost_by_hand(tied: bool) -> None:
    # Per layer q 4x4, k and v 2x4 each, their biases 4 + 2 + 2, o 4x4, gate, up and down 6x4, norms 2x4; and the head.
    layer = 16 + 8 + 8 + 8 + 16 + 72 + 8
    weights = 3 * layer + 4 + 10 * 4
    assert quadratic_cost(TINY | {"tie_word_embeddings": tied}) == pytest.approx(3 * 2 * (2 + 2) / (2 * weights))


def test_quadratic_cost_of_deepseek_v3() -> None:
    """36.6e9 active weights without the embedding; 61 layers of 128 heads with dimensions 192 and 128."""
    hf = json.loads((CONFIGS / "deepseek_v3.json").read_text())
    assert quadratic_cost(hf) == pytest.approx(61 * 128 * 320 / (2 * 36.6e9), rel=0.01)
