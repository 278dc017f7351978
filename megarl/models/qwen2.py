"""Qwen2 and Qwen2.5, dense: grouped-query attention with biases of q, k and v; the output layer may be tied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn.functional import silu

from megarl.models import blocks
from megarl.models.family import Family
from megarl.models.layout import HFConfig, Param
from megarl.models.options import default_rope, need, require_common


def megatron_config(hf: HFConfig) -> dict[str, Any]:
    _check(hf)
    return dict(
        num_layers=need(hf, "num_hidden_layers"),
        hidden_size=need(hf, "hidden_size"),
        ffn_hidden_size=need(hf, "intermediate_size"),
        num_attention_heads=need(hf, "num_attention_heads"),
        num_query_groups=_groups(hf),
        kv_channels=_head_dim(hf),
        add_qkv_bias=True,
        normalization="RMSNorm",
        layernorm_epsilon=need(hf, "rms_norm_eps"),
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=hf.get("initializer_range", 0.02),
    )


def gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    return dict(
        vocab_size=need(hf, "vocab_size"),
        max_sequence_length=need(hf, "max_position_embeddings"),
        position_embedding_type="rope",
        rotary_base=default_rope(hf),
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
    )


def layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    hidden, ffn = need(hf, "hidden_size"), need(hf, "intermediate_size")
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    heads = need(hf, "num_attention_heads")
    return [
        blocks.norm(f"{ours}.input_layernorm", f"{theirs}.input_layernorm", hidden),
        *blocks.grouped_attention(layer, hidden, heads, _groups(hf), _head_dim(hf), bias=True),
        blocks.norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm", hidden),
        *blocks.gated_mlp(f"{ours}.mlp", f"{theirs}.mlp", hidden, ffn, "intermediate_size"),
    ]


def _check(hf: HFConfig) -> None:
    require_common(hf)
    default_rope(hf)


def _groups(hf: HFConfig) -> int:
    return int(hf.get("num_key_value_heads") or need(hf, "num_attention_heads"))


def _head_dim(hf: HFConfig) -> int:
    return int(hf.get("head_dim") or need(hf, "hidden_size") // need(hf, "num_attention_heads"))


FAMILY = Family(
    "Qwen2ForCausalLM", "qwen2", _check, megatron_config, gpt_kwargs, layer, lambda hf: 0, tool_call_parser="qwen25"
)
