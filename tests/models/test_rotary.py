"""Frequencies and scales of rotary embeddings against transformers' for the same config.json."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from megarl.config import ConfigError
from megarl.models import blocks
from megarl.models.registry import family_of

pytestmark = pytest.mark.alone

SIZES: dict[str, Any] = dict(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
)
GLM = SIZES | dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
MODELS = {
    "Qwen2": SIZES,
    "Qwen3": SIZES | {"head_dim": 128},
    "Llama": SIZES | {"head_dim": 64},
    "Qwen3Moe": SIZES | dict(head_dim=128, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    "Glm4Moe": GLM | {"head_dim": 128},  # rotates half of each head
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
BLOCKS: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    YARN,  # Qwen2.5 and Qwen3 for long texts
    *(YARN | {"truncate": truncate, "rope_theta": 150000.0, "factor": 32.0} for truncate in (True, False)),
    YARN | {"beta_fast": 16.0, "beta_slow": 2},
    YARN | {"beta_fast": 1, "beta_slow": 1},
    YARN | {"beta_fast": 1, "beta_slow": 1, "truncate": False},  # a range of no pairs
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    YARN | {"mscale": 0.5},
    YARN | {"attention_factor": 0.1 * math.log(4.0) + 1},
    YARN | {"attention_factor": None, "factor": 1.0},
    {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"},
    *(
        LLAMA3 | dict(low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=length)
        for low, high, length in ((1.0, 4.0, 8192), (0.5, 3.0, 12), (2, 16, 4096))
    ),
]


@pytest.mark.parametrize(("name", "block"), itertools.product(MODELS, BLOCKS), ids=str)
def test_frequencies_and_scale_match_transformers(name: str, block: dict[str, Any]) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = MODELS[name] | {"architectures": [f"{name}ForCausalLM"], "rope_parameters": block}
    config = getattr(transformers, f"{name}Config")(**MODELS[name], rope_parameters=dict(block))
    expected, scale = ROPE_INIT_FUNCTIONS[block["rope_type"]](config)
    rotary = family_of(hf).extras(hf).rotary
    assert rotary is not None and rotary == blocks.rotary(hf)
    actual = rotary.frequencies
    assert actual.dtype == torch.float32 and actual.shape == expected.shape
    if block["rope_type"] == "llama3":  # blended in another order
        torch.testing.assert_close(actual, expected, rtol=3e-7, atol=0)
    else:
        assert torch.equal(actual, expected)
    assert rotary.scale == pytest.approx(scale, abs=1e-12)
    assert bool(
        (actual < 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(len(actual)) / len(actual))).any()
    ) == (block["factor"] > 1)


def test_default_embeddings_are_not_scaled() -> None:
    for name, sizes in MODELS.items():
        hf = sizes | {"architectures": [f"{name}ForCausalLM"], "rope_theta": 1e6}
        assert family_of(hf).extras(hf).rotary is None


def test_fused_kernels_are_refused_where_cosines_have_a_factor() -> None:
    from megarl.models import megatron_fields

    for block, refuses in ((YARN, True), (BLOCKS[0], False), (YARN | {"factor": 1.0}, False)):
        hf = MODELS["Qwen3"] | {"architectures": ["Qwen3ForCausalLM"], "rope_parameters": block}
        extras = family_of(hf).extras(hf)
        for field in ("apply_rope_fusion", "fused_single_qkv_rope"):
            megatron_fields.check({field: False}, False, extras)
            if refuses:
                with pytest.raises(ConfigError, match=f"{field}: the fused kernel has no factor .* is 1.13863 "):
                    megatron_fields.check({field: True}, False, extras)
            else:
                megatron_fields.check({field: True}, False, extras)
