"""Gemma 2: dense, with norms before and after attention and MLP, soft caps, and a sliding window in every other layer.

Norms multiply by 1 + w; Megatron, HF and SGLang all store w. Embeddings are scaled by the constant sqrt(hidden_size).
The head is tied.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch.nn.functional import gelu

from megarl.config.strict import PositiveFloat, PositiveInt
from megarl.models import blocks
from megarl.models.config_json import (
    Heads,
    Size,
    need,
    require,
    require_common,
    require_default_rope,
    require_present,
    require_types,
)
from megarl.models.family import Extras, Family
from megarl.models.layout_algebra import HFConfig, Param

GELU_TANH = partial(gelu, approximate="tanh")
SLIDING, FULL = "sliding_attention", "full_attention"


def _config(hf: HFConfig) -> dict[str, Any]:
    _check(hf)
    return blocks.gqa_config(hf) | dict(
        activation_func=GELU_TANH,
        layernorm_zero_centered_gamma=True,
        softmax_scale=float(need(hf, "query_pre_attn_scalar") ** -0.5),
        window_size=(need(hf, "sliding_window") - 1, 0),  # keys before and after the query's own position
        window_attn_skip_freq=[int(kind == SLIDING) for kind in _layer_types(hf)],  # 1 for layers with a window
    )


def _extras(hf: HFConfig) -> Extras:
    return Extras(
        attention_cap=float(need(hf, "attn_logit_softcapping")),
        logit_cap=float(need(hf, "final_logit_softcapping")),
        embedding_scale=float(need(hf, "hidden_size") ** 0.5),
        post_norms=True,
    )


def _layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    megatron_prefix, hf_prefix, hidden = f"decoder.layers.{layer}", f"model.layers.{layer}", need(hf, "hidden_size")
    return [
        *blocks.gqa_params(hf, layer, before_mlp="pre_feedforward_layernorm"),
        blocks.norm(f"{megatron_prefix}.post_self_attn_layernorm", f"{hf_prefix}.post_attention_layernorm", hidden),
        *blocks.dense_mlp(hf, layer),
        blocks.norm(f"{megatron_prefix}.post_mlp_layernorm", f"{hf_prefix}.post_feedforward_layernorm", hidden),
    ]


def _layer_types(hf: HFConfig) -> list[str]:
    """Return the layer types of the published models, which SGLang hard-codes."""
    return [FULL if layer % 2 else SLIDING for layer in range(need(hf, "num_hidden_layers"))]


FIELDS: dict[str, Any] = {
    "head_dim": Size,
    "num_key_value_heads": Heads,
    "sliding_window": PositiveInt,
    "query_pre_attn_scalar": PositiveFloat,
    "attn_logit_softcapping": PositiveFloat,
    "final_logit_softcapping": PositiveFloat,
}


def _check(hf: HFConfig) -> None:
    require_types(hf, FIELDS)
    blocks.require_heads(hf)
    require_common(hf, activation="gelu_pytorch_tanh", layer_types=_layer_types(hf))
    require(hf, "hidden_activation", "gelu_pytorch_tanh")
    require(hf, "attention_bias", False)
    require(hf, "use_bidirectional_attention", None, (False,))
    require(hf, "tie_word_embeddings", True)
    require_default_rope(hf)
    require_present(hf, "hidden_act", "gelu_pytorch_tanh")
    _extras(hf)  # raises for null caps, which SGLang cannot read either


FAMILY = Family(
    "Gemma2ForCausalLM", "gemma2", _check, _config, blocks.gpt_kwargs, _layer, lambda hf: 0, "pythonic", extras=_extras
)
