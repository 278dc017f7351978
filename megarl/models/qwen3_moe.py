"""Qwen3-MoE: grouped-query attention with norms of q and k, and softmax-routed experts in every layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megarl.config import ConfigError
from megarl.models import blocks
from megarl.models.config_json import (
    Experts,
    Heads,
    Size,
    need,
    require,
    require_common,
    require_default_rope,
    require_experts,
    require_same,
    require_types,
)
from megarl.models.family import Family
from megarl.models.layout_algebra import HFConfig, Param


def megatron_config(hf: HFConfig) -> dict[str, Any]:
    _check(hf)
    return blocks.gqa_config(hf, qk_norm=True) | dict(
        num_moe_experts=_num_experts(hf),
        moe_ffn_hidden_size=need(hf, "moe_intermediate_size"),
        moe_router_topk=need(hf, "num_experts_per_tok"),
        # Megatron renormalises the chosen weights by taking the softmax after the top-k, which is equivalent.
        moe_router_pre_softmax=not need(hf, "norm_topk_prob"),
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    hidden, ffn = need(hf, "hidden_size"), need(hf, "moe_intermediate_size")
    moe = blocks.moe_params(layer, hidden, ffn, _num_experts(hf), experts)
    return blocks.gqa_params(hf, layer, qk_norm=True) + moe


FIELDS: dict[str, Any] = {
    "num_experts": Experts,
    "num_local_experts": Experts,
    "num_experts_per_tok": Experts,
    "moe_intermediate_size": Size,
    "num_key_value_heads": Heads,
    "norm_topk_prob": bool,
}


def _check(hf: HFConfig) -> None:
    require_types(hf, FIELDS)
    require_same(hf, "num_experts", "num_local_experts")
    require_common(hf)
    blocks.require_heads(hf)
    require_experts(hf, _num_experts(hf))
    require(hf, "attention_bias", False)
    require(hf, "decoder_sparse_step", 1)
    require(hf, "mlp_only_layers", [], (None,))
    require_default_rope(hf)
    if need(hf, "num_experts_per_tok") == 1 and need(hf, "norm_topk_prob"):
        # The single expert's weight would always be 1, so the router could not learn. Megatron rejects it too.
        raise ConfigError("config.json: norm_topk_prob=True with num_experts_per_tok=1 is not implemented")


def _num_experts(hf: HFConfig) -> int:
    # transformers 5 accepts both names
    return int(need(hf, "num_local_experts" if "num_local_experts" in hf else "num_experts"))


FAMILY = Family(
    "Qwen3MoeForCausalLM", "qwen3_moe", _check, megatron_config, blocks.gpt_kwargs, layer, _num_experts, "qwen25"
)
