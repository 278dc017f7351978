"""ERNIE 4.5 MoE: softmax routing with a balancing bias, shared experts, dense first layers, interleaved rotation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from megarl.config import ConfigError
from megarl.config.strict import Range
from megarl.models import blocks, config_json
from megarl.models.config_json import Experts, Few, Size, need
from megarl.models.family import Extras, Family
from megarl.models.layout_algebra import HFConfig, HFTensor, Param

config_json.DEFAULTS["ernie45moe"] = config_json.SHARED | {
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "moe_num_shared_experts": 2,
    "moe_norm_min": 1e-12,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
}
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("moe_num_experts", "num_experts", "moe_k", "num_experts_per_tok"), Experts),
    **dict.fromkeys(("moe_num_shared_experts", "moe_layer_start_index"), Few),
    "moe_layer_end_index": Annotated[int, Range(-1, 1000)],
    "moe_intermediate_size": Size,
}
_NAMES = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
"""Keys, and the other names that transformers accepts for them."""


def _get(hf: HFConfig, key: str) -> int:
    return int(need(hf, _NAMES[key] if _NAMES[key] in hf else key))


def _num_experts(hf: HFConfig) -> int:
    return _get(hf, "moe_num_experts")


def _check(hf: HFConfig) -> None:
    config_json.require_types(hf, _FIELDS)
    config_json.require_common(hf, neox_rope=False)
    blocks.require_heads(hf)
    for key, other in _NAMES.items():
        config_json.require_same(hf, key, other)
    config_json.require_experts({**hf, "num_experts_per_tok": _get(hf, "moe_k")}, _num_experts(hf))
    config_json.require(hf, "use_bias", False)
    config_json.require(hf, "attention_bias", False)
    config_json.require(hf, "mlp_bias", False)
    # transformers counts the interval from layer 0, SGLang from the first MoE layer.
    config_json.require(hf, "moe_layer_interval", 1)
    config_json.require(hf, "moe_norm_min", 1e-12)  # SGLang ignores it
    if _get(hf, "moe_k") == 1:
        # The single expert's weight would always be 1, so the router could not learn.
        raise ConfigError("config.json: moe_k=1 with normalised weights of experts is not implemented")
    if (last := hf.get("moe_layer_end_index", -1)) >= (layers := need(hf, "num_hidden_layers")):
        raise ConfigError(f"config.json: moe_layer_end_index={last} of {layers} layers, which are numbered from 0")
    if not any(_moe_layers(hf)):
        raise ConfigError("config.json: moe_layer_start_index and moe_layer_end_index leave no layer with experts")


def _moe_layers(hf: HFConfig) -> list[int]:
    """Return 1 for each layer with experts, and 0 for each dense layer."""
    layers, last = need(hf, "num_hidden_layers"), hf.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    return [int(need(hf, "moe_layer_start_index") <= layer <= last) for layer in range(layers)]


def _config(hf: HFConfig) -> dict[str, Any]:
    _check(hf)
    width = need(hf, "moe_intermediate_size")
    return blocks.gqa_config(hf) | dict(
        rotary_interleaved=True,
        num_moe_experts=_num_experts(hf),
        moe_layer_freq=_moe_layers(hf),
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=width * need(hf, "moe_num_shared_experts") or None,
        moe_router_topk=_get(hf, "moe_k"),
        moe_router_score_function="softmax",
        moe_router_pre_softmax=True,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def _layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    rows = blocks.gqa_params(hf, layer)
    if not _moe_layers(hf)[layer]:
        return rows + blocks.dense_mlp(hf, layer)
    hidden, ffn, shared = (need(hf, key) for key in ("hidden_size", "moe_intermediate_size", "moe_num_shared_experts"))
    mlp, count = f"model.layers.{layer}.mlp", _num_experts(hf)
    bias = HFTensor(f"{mlp}.moe_statics.e_score_correction_bias", (1, count))
    rows += blocks.moe_params(layer, hidden, ffn, count, experts)
    rows.append(blocks.router_bias(layer, bias, f"{mlp}.gate.e_score_correction_bias"))
    if shared:
        names, key = (f"decoder.layers.{layer}.mlp.shared_experts", f"{mlp}.shared_experts"), "moe_intermediate_size"
        rows += blocks.gated_mlp(*names, hidden, shared * ffn, f"{key} x moe_num_shared_experts", grid="shared")
    return rows


ERNIE4_5_MOE = Family(
    "Ernie4_5_MoeForCausalLM",
    "ernie4_5_moe",
    _check,
    _config,
    blocks.gpt_kwargs,
    _layer,
    _num_experts,
    tool_call_parser="qwen25",
    extras=lambda hf: Extras(has_softmax_bias=True, rotary=blocks.rotary(hf)),
    untrained_prefixes=lambda hf: ("model.mtp_",),  # of multi-token prediction
)
