"""Ling 2 and Ring 2 (inclusionAI): DeepSeek-V3's routing and experts; attention with norms of queries and keys, that
rotates a part of each head.

transformers has no class for them: SGLang reads config.json by the class in the model's own folder
(`rollout.sglang.trust_remote_code`). So no key has a default that is known here, and all that matter are required.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megarl.config import ConfigError
from megarl.models import blocks, config_json, deepseek
from megarl.models.blocks import HEADS, norm, weight
from megarl.models.config_json import Experts, Few, Heads, Size, need, rope_options
from megarl.models.family import Extras, Family
from megarl.models.layout_algebra import (
    Dim1Sharding,
    EngineQKVSharding,
    EngineSlot,
    FusedSharding,
    HFConfig,
    HFTensor,
    Param,
    QKVSharding,
)

config_json.DEFAULTS["bailingmoev2"] = {
    key: value for key, value in config_json.SHARED.items() if key not in ("partial_rotary_factor", "rope_theta")
}
_FIELDS: dict[str, Any] = deepseek.FIELDS | {
    "num_experts": Experts,
    "num_shared_experts": Few,
    "num_key_value_heads": Heads,
    "moe_shared_expert_intermediate_size": Size | None,
    **dict.fromkeys(("use_qk_norm", "use_bias", "use_qkv_bias", "norm_head", "moe_router_enable_expert_bias"), bool),
}


def _in_deepseek_terms(hf: HFConfig) -> HFConfig:
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    return {**hf, **{name: need(hf, key) for name, key in names.items()}}


def _check(hf: HFConfig) -> None:
    config_json.require_types(hf, _FIELDS)
    config_json.require_common(hf, partial_rotary=True)
    blocks.require_heads(hf)
    config_json.require_present(hf, "partial_rotary_factor", rope_options(hf)["partial_rotary_factor"])
    for key, value in {"use_qk_norm": True, "use_bias": False, "use_qkv_bias": False}.items():
        config_json.require_present(hf, key, value)
    config_json.require_present(hf, "moe_router_enable_expert_bias", True)
    for key, default in {
        "score_function": "sigmoid",
        "norm_head": False,
        "multi_gate": False,
        "router_type": "topN",
        "embedding_dropout": 0.0,
        "output_dropout": 0.0,
        "use_rmsnorm": True,
        "attention_bias": False,
    }.items():
        config_json.require(hf, key, default)
    config_json.require(hf, "moe_shared_expert_intermediate_size", None, (need(hf, "moe_intermediate_size"),))
    config_json.require(hf, "router_dtype", None, ("fp32",))
    need(hf, "first_k_dense_replace")
    try:
        deepseek.check_sigmoid_routing(_in_deepseek_terms(hf))
    except ConfigError as error:
        raise ConfigError(str(error).replace("n_routed_experts", "num_experts")) from None


def _config(hf: HFConfig) -> dict[str, Any]:
    _check(hf)
    experts = deepseek.experts_config(_in_deepseek_terms(hf))
    return blocks.gqa_config(hf, qk_norm=True) | experts | deepseek.SIGMOID_ROUTING


def _gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    return blocks.gpt_kwargs(hf) | dict(rotary_percent=float(rope_options(hf)["partial_rotary_factor"]))


def _layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    megatron, hf_layer, hidden = f"decoder.layers.{layer}", f"model.layers.{layer}", need(hf, "hidden_size")
    attention, hf_attention = f"{megatron}.self_attention", f"{hf_layer}.attention"
    heads, kv_heads, size = need(hf, HEADS), blocks.num_kv_heads(hf), blocks.head_dim(hf)
    units = (heads, kv_heads, kv_heads)
    qkv = HFTensor(f"{hf_attention}.query_key_value.weight", (sum(units) * size, hidden))
    slot = EngineSlot(qkv.name, FusedSharding(EngineQKVSharding(heads, kv_heads), units), "attention")
    output = f"{attention}.linear_proj", f"{hf_attention}.dense", (hidden, heads * size)
    mlp = deepseek.mlp(_in_deepseek_terms(hf), layer, experts, bias=True, bias_name="expert_bias")
    return [
        norm(f"{megatron}.input_layernorm", f"{hf_layer}.input_layernorm", hidden),
        Param(f"{attention}.linear_qkv.weight", (qkv,), FusedSharding(QKVSharding(kv_heads), units), slot),
        norm(f"{attention}.q_layernorm", f"{hf_attention}.query_layernorm", size),
        norm(f"{attention}.k_layernorm", f"{hf_attention}.key_layernorm", size),
        weight(*output, Dim1Sharding(heads, HEADS)),
        norm(f"{megatron}.pre_mlp_layernorm", f"{hf_layer}.post_attention_layernorm", hidden),
        *(blocks.with_fp32_router(mlp) if hf.get("router_dtype") == "fp32" else mlp),
    ]


def _mtp_prefixes(hf: HFConfig) -> tuple[str, ...]:
    """Return the prefixes of multi-token prediction layers, which are exported as they were loaded."""
    first = need(hf, "num_hidden_layers")
    return tuple(f"model.layers.{first + k}." for k in range(int(hf.get("num_nextn_predict_layers") or 0)))


LING2 = Family(
    "BailingMoeV2ForCausalLM",
    "bailing_moe_v2",
    _check,
    _config,
    _gpt_kwargs,
    _layer,
    lambda hf: int(need(hf, "num_experts")),
    tool_call_parser="qwen25",
    extras=lambda hf: Extras(rotary=blocks.rotary(hf)),
    untrained_prefixes=_mtp_prefixes,
    embedding_name="model.word_embeddings",
)
