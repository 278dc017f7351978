"""Qwen3-MoE: grouped-query attention with norms of q and k; every layer a softmax-routed mixture of experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn.functional import silu

from megarl.config import ConfigError
from megarl.models import blocks
from megarl.models.family import Family
from megarl.models.layout import HFConfig, Param
from megarl.models.options import default_rope, need, require, require_common


def megatron_config(hf: HFConfig) -> dict[str, Any]:
    _check(hf)
    return dict(
        num_layers=need(hf, "num_hidden_layers"),
        hidden_size=need(hf, "hidden_size"),
        ffn_hidden_size=need(hf, "intermediate_size"),
        num_attention_heads=need(hf, "num_attention_heads"),
        num_query_groups=need(hf, "num_key_value_heads"),
        kv_channels=_head_dim(hf),
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=need(hf, "rms_norm_eps"),
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=hf.get("initializer_range", 0.02),
        num_moe_experts=_num_experts(hf),
        moe_ffn_hidden_size=need(hf, "moe_intermediate_size"),
        moe_router_topk=need(hf, "num_experts_per_tok"),
        # Megatron renormalises the chosen weights by taking the softmax after the top-k: the same number.
        moe_router_pre_softmax=not hf.get("norm_topk_prob", False),
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
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
    hidden, heads, groups = need(hf, "hidden_size"), need(hf, "num_attention_heads"), need(hf, "num_key_value_heads")
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    return [
        blocks.norm(f"{ours}.input_layernorm", f"{theirs}.input_layernorm", hidden),
        *blocks.grouped_attention(layer, hidden, heads, groups, _head_dim(hf), qk_norm=True),
        blocks.norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm", hidden),
        *blocks.experts(layer, hidden, need(hf, "moe_intermediate_size"), _num_experts(hf), experts),
    ]


def _check(hf: HFConfig) -> None:
    require_common(hf)
    require(hf, "attention_bias", False)
    require(hf, "decoder_sparse_step", 1)
    require(hf, "mlp_only_layers", [])
    default_rope(hf)
    if need(hf, "num_experts_per_tok") == 1 and hf.get("norm_topk_prob", False):
        # the weight of the one expert would always be 1 and the router would learn nothing; Megatron refuses it too
        raise ConfigError("config.json: norm_topk_prob=True with num_experts_per_tok=1 is not implemented")


def _head_dim(hf: HFConfig) -> int:
    return int(hf.get("head_dim") or need(hf, "hidden_size") // need(hf, "num_attention_heads"))


def _num_experts(hf: HFConfig) -> int:
    return int(hf.get("num_experts") or need(hf, "num_local_experts"))  # transformers 5 has both names


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _check,
    megatron_config,
    gpt_kwargs,
    layer,
    _num_experts,
    tool_call_parser="qwen25",
)
