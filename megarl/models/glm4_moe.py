"""GLM-4.5 and after: grouped-query attention that turns half of each head; DeepSeek-V3's routing and experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import silu

from megarl.models import blocks, deepseek
from megarl.models.family import Family
from megarl.models.layout import HFConfig, Param
from megarl.models.options import default_rope, need, require_common, rope


def _config(hf: HFConfig) -> dict[str, Any]:
    _check(hf)
    return (
        deepseek.experts_config(hf)
        | deepseek.sigmoid_routing(hf)
        | dict(
            num_layers=need(hf, "num_hidden_layers"),
            hidden_size=need(hf, "hidden_size"),
            ffn_hidden_size=need(hf, "intermediate_size"),
            num_attention_heads=need(hf, "num_attention_heads"),
            num_query_groups=need(hf, "num_key_value_heads"),
            kv_channels=_head_dim(hf),
            add_qkv_bias=bool(hf.get("attention_bias", False)),
            qk_layernorm=bool(hf.get("use_qk_norm", False)),
            normalization="RMSNorm",
            layernorm_epsilon=need(hf, "rms_norm_eps"),
            gated_linear_unit=True,
            activation_func=silu,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            init_method_std=hf.get("initializer_range", 0.02),
        )
    )


def _gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    return dict(
        vocab_size=need(hf, "vocab_size"),
        max_sequence_length=need(hf, "max_position_embeddings"),
        position_embedding_type="rope",
        rotary_base=default_rope(hf, partial_rotary=True),
        rotary_percent=float(rope(hf)["partial_rotary_factor"]),
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
    )


def _layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    hidden, heads, groups = need(hf, "hidden_size"), need(hf, "num_attention_heads"), need(hf, "num_key_value_heads")
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    bias, qk_norm = bool(hf.get("attention_bias", False)), bool(hf.get("use_qk_norm", False))
    rows = [
        blocks.norm(f"{ours}.input_layernorm", f"{theirs}.input_layernorm", hidden),
        *blocks.grouped_attention(layer, hidden, heads, groups, _head_dim(hf), bias, qk_norm),
        blocks.norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm", hidden),
        *deepseek.mlp(hf, layer, experts, bias=True),
    ]
    # SGLang keeps the router in FP32 whatever the model's type.
    return [replace(row, dtype=torch.float32) if row.megatron.endswith(".router.weight") else row for row in rows]


def _check(hf: HFConfig) -> None:
    require_common(hf, partial_rotary=True)
    default_rope(hf, partial_rotary=True)
    deepseek.check_sigmoid_routing(hf)


def _head_dim(hf: HFConfig) -> int:
    return int(hf.get("head_dim") or need(hf, "hidden_size") // need(hf, "num_attention_heads"))


FAMILY = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    _check,
    _config,
    _gpt_kwargs,
    _layer,
    deepseek.num_experts,
    tool_call_parser="glm45",
    untrained=deepseek.untrained,
)
