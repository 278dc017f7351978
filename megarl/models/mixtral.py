"""Families with Mixtral's names of experts: Mixtral, and MiniMax-M2 (with M2.1 and M2.5 by their config.json).

Checkpoints and engines name an expert's gate, up and down projections w1, w3 and w2, and the MLP `block_sparse_moe`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megarl.config import ConfigError
from megarl.models import blocks, config_json
from megarl.models.config_json import Experts, Few, Heads, Size, need, rope_options
from megarl.models.deepseek import SIGMOID_ROUTING
from megarl.models.family import Extras, Family
from megarl.models.layout_algebra import HFConfig, HFTensor, Param

config_json.DEFAULTS["mixtral"] = config_json.SHARED | {"rope_theta": 1000000.0, "router_jitter_noise": 0.0}
config_json.DEFAULTS["minimaxm2"] = config_json.DEFAULTS["mixtral"] | {"head_dim": 128, "rope_theta": 5000000.0}
_MLP, _PROJECTIONS = "block_sparse_moe", ("w1", "w3", "w2")
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "num_experts_per_tok"), Experts),
    "num_key_value_heads": Heads,
}


def _check_experts(hf: HFConfig) -> None:
    config_json.require_same(hf, "num_local_experts", "num_experts")
    config_json.require_experts(hf, _num_experts(hf))
    config_json.require(hf, "router_jitter_noise", 0.0)
    config_json.require(hf, "tie_word_embeddings", False)  # SGLang does not tie them
    config_json.require(hf, "sliding_window", None)
    config_json.require(hf, "attention_bias", False)
    blocks.require_heads(hf)
    if need(hf, "num_experts_per_tok") == 1:
        # The single expert's weight would always be 1, so the router could not learn. Megatron rejects it too.
        raise ConfigError("config.json: num_experts_per_tok=1 with normalised weights of experts is not implemented")


def _num_experts(hf: HFConfig) -> int:
    # transformers accepts both names
    return int(need(hf, "num_experts" if "num_experts" in hf else "num_local_experts"))


def _experts_config(hf: HFConfig) -> dict[str, Any]:
    return dict(
        num_moe_experts=_num_experts(hf),
        moe_ffn_hidden_size=need(hf, "intermediate_size"),
        moe_router_topk=need(hf, "num_experts_per_tok"),
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def _moe(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    hidden, key = need(hf, "hidden_size"), "intermediate_size"
    return blocks.moe_params(layer, hidden, need(hf, key), _num_experts(hf), experts, _MLP, _PROJECTIONS, key)


# Mixtral: the softmax is over the chosen experts.


def _check_mixtral(hf: HFConfig) -> None:
    config_json.require_types(hf, _FIELDS)
    config_json.require_common(hf)
    _check_experts(hf)
    # SGLang ignores it
    config_json.require(hf, "head_dim", None, (need(hf, "hidden_size") // need(hf, blocks.HEADS),))


def _mixtral_config(hf: HFConfig) -> dict[str, Any]:
    _check_mixtral(hf)
    return blocks.gqa_config(hf) | _experts_config(hf) | dict(moe_router_pre_softmax=False)


MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    _check_mixtral,
    _mixtral_config,
    blocks.gpt_kwargs,
    lambda hf, layer, experts: blocks.gqa_params(hf, layer) + _moe(hf, layer, experts),
    _num_experts,
    tool_call_parser="mistral",
    extras=lambda hf: Extras(rotary=blocks.rotary(hf)),
)


# MiniMax-M2: norms of q and k over all heads together, rotation of a part of each head, and sigmoid routing.

_MINIMAX_M2_FIELDS: dict[str, Any] = _FIELDS | {
    "head_dim": Size,
    "rotary_dim": Size,
    "num_mtp_modules": Few,
    "attn_type_list": list[int] | None,
}


def _with_rotary_share(hf: HFConfig) -> HFConfig:
    """Return config.json with `partial_rotary_factor`, which transformers derives from `rotary_dim`."""
    sizes = hf.get("rotary_dim"), hf.get("head_dim", config_json.DEFAULTS["minimaxm2"]["head_dim"])
    if all(isinstance(size, int) and size > 0 for size in sizes):  # `require_types` refuses others
        return {"partial_rotary_factor": sizes[0] / sizes[1], **hf}
    return hf


def _check_minimax_m2(hf: HFConfig) -> None:
    complete = _with_rotary_share(hf)
    config_json.require_types(complete, _MINIMAX_M2_FIELDS)
    config_json.require_common(complete, partial_rotary=True)
    _check_experts(complete)
    # SGLang reads these without transformers' defaults: without them it has other norms and routing.
    rotated = round(need(hf, "head_dim") * rope_options(complete)["partial_rotary_factor"])
    for key, value in {
        "rotary_dim": rotated,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
    }.items():
        config_json.require_present(hf, key, value)
    config_json.require(hf, "qk_norm_type", "per_layer")
    config_json.require(hf, "shared_intermediate_size", 0)
    if any(kind != 1 for kind in hf.get("attn_type_list") or ()):
        raise ConfigError("config.json: attn_type_list with layers other than 1, softmax attention, is not implemented")


def _minimax_m2_config(hf: HFConfig) -> dict[str, Any]:
    _check_minimax_m2(hf)
    # The spec's norms, sharded like the heads. With qk_layernorm Megatron would add up their gradients over the ranks.
    norms = dict(qk_l2_norm=True)
    return blocks.gqa_config(_with_rotary_share(hf)) | norms | _experts_config(hf) | SIGMOID_ROUTING


def _minimax_m2_gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    complete = _with_rotary_share(hf)
    return blocks.gpt_kwargs(complete) | dict(rotary_percent=float(rope_options(complete)["partial_rotary_factor"]))


def _minimax_m2_layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    rows = blocks.gqa_params(hf, layer, norm_over_heads=True) + blocks.with_fp32_router(_moe(hf, layer, experts))
    bias = HFTensor(f"model.layers.{layer}.{_MLP}.e_score_correction_bias", (_num_experts(hf),))
    return [*rows, blocks.router_bias(layer, bias)]


def _mtp_prefixes(hf: HFConfig) -> tuple[str, ...]:
    """Return the prefixes of multi-token prediction modules, which are exported as they were loaded, if published."""
    first = need(hf, "num_hidden_layers")
    return tuple(f"model.layers.{first + k}." for k in range(int(hf.get("num_mtp_modules") or 0)))


MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    _check_minimax_m2,
    _minimax_m2_config,
    _minimax_m2_gpt_kwargs,
    _minimax_m2_layer,
    _num_experts,
    tool_call_parser="minimax-m2",
    extras=lambda hf: Extras(norm_over_heads=True, rotary=blocks.rotary(_with_rotary_share(hf))),
    untrained_prefixes=_mtp_prefixes,
)
