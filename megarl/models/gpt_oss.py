"""gpt-oss: attention with a learned sink per head, windows in every other layer, and experts with biases.

The experts' activation is (up + 1) * gate * sigmoid(1.702 gate), with gate at most `swiglu_limit` and up within it.
Checkpoints and SGLang keep the rows of gate and up alternating. So does the trainer (`moe_mlp_glu_interleave_size`), as
any other order would cut the weight sync into single rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.config import ConfigError
from megarl.config.strict import PositiveFloat, PositiveInt
from megarl.models import blocks, config_json
from megarl.models.blocks import HEADS, weight
from megarl.models.config_json import Experts, Heads, Size, need
from megarl.models.family import Extras, Family, StoredSlice
from megarl.models.layout_algebra import (
    PADDING,
    Dim0Sharding,
    Dim1Sharding,
    EngineSlot,
    HFConfig,
    HFTensor,
    Param,
    Replicated,
    Sharding,
    ShardSpec,
    Slice,
)

SLIDING, FULL = "sliding_attention", "full_attention"
ALPHA = 1.702
"""Factor in the activation's sigmoid. SGLang 0.5.23 reads it from `hidden_act_alpha`, transformers from `swiglu_alpha`,
and config.json has neither."""

_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "num_experts_per_tok"), Experts),
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit", "hidden_act_alpha"), PositiveFloat),
    "head_dim": Size,
    "num_key_value_heads": Heads,
    "sliding_window": PositiveInt,
}


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(ALPHA * x)


@dataclass(frozen=True)
class ExpertBiasSharding(Sharding):
    """Full biases on every rank, without tensor parallelism of experts, which Megatron refuses for experts with biases.

    Each rank would add the whole bias of the down projection to its part of the sum.
    """

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        if tp > 1:
            raise ConfigError(
                f"parallel.etp={tp}: Megatron-Core 0.19.2 supports biases of experts, which this model has, only "
                "without tensor parallelism of experts; set parallel.etp=1 and raise parallel.ep instead"
            )
        return Replicated().split(sources, tp, rank)


@dataclass(frozen=True)
class FirstRankSharding(Sharding):
    """The full tensor on the first rank, and zeros on the others: SGLang's biases before a sum over ranks."""

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        return ShardSpec(0, (Slice(0 if rank == 0 else PADDING, 0, sources[0][0]),))


def _check(hf: HFConfig) -> None:
    config_json.require_types(hf, _FIELDS)
    config_json.require_common(hf, layer_types=_layer_types(hf), mxfp4=True)
    blocks.require_heads(hf)
    config_json.require_same(hf, "num_local_experts", "num_experts")
    config_json.require_experts(hf, _num_experts(hf))
    config_json.require(hf, "attention_bias", True)
    for key in ("swiglu_alpha", "hidden_act_alpha"):
        config_json.require(hf, key, ALPHA)
    if need(hf, "num_experts_per_tok") == 1:
        raise ConfigError(
            "config.json: num_experts_per_tok=1 is not implemented: the softmax over one expert is always 1, so the "
            "router could not learn"
        )
    if not hf.get("rope_scaling") and not hf.get("rope_parameters"):
        raise ConfigError(
            "config.json has no rope_scaling, for which transformers takes YaRN with a factor of 32; write it out"
        )


def _layer_types(hf: HFConfig) -> list[str]:
    """Return the layer types in config.json, by default windows in every other layer, beginning with the first."""
    layers = need(hf, "num_hidden_layers")
    types = list(hf.get("layer_types") or [FULL if layer % 2 else SLIDING for layer in range(layers)])
    if len(types) != layers:
        raise ConfigError(f"config.json: layer_types has {len(types)} entries for {layers} layers")
    for kind in types:
        if kind not in (SLIDING, FULL):
            raise ConfigError(f"config.json: layer_types with {kind!r} is not implemented: {SLIDING} or {FULL}")
    return types


def _num_experts(hf: HFConfig) -> int:
    # transformers 5 accepts both names
    return int(need(hf, "num_experts" if "num_experts" in hf else "num_local_experts"))


def _megatron_config(hf: HFConfig) -> dict[str, Any]:
    _check(hf)
    return blocks.gqa_config(hf, bias=True) | dict(
        add_bias_linear=True,
        softmax_type="learnable",
        window_size=(need(hf, "sliding_window") - 1, 0),  # keys before and after the query's own position
        window_attn_skip_freq=[int(kind == SLIDING) for kind in _layer_types(hf)],  # 1 for layers with a window
        activation_func=quick_gelu,
        activation_func_clamp_value=float(need(hf, "swiglu_limit")),
        glu_linear_offset=1.0,
        moe_mlp_glu_interleave_size=1,
        num_moe_experts=_num_experts(hf),
        moe_ffn_hidden_size=need(hf, "intermediate_size"),
        moe_router_topk=need(hf, "num_experts_per_tok"),
        moe_router_pre_softmax=False,  # softmax over the chosen experts' logits
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def _layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    hidden, heads, count = need(hf, "hidden_size"), need(hf, HEADS), _num_experts(hf)
    megatron, hf_layer = f"decoder.layers.{layer}", f"model.layers.{layer}"
    attention, router = f"{megatron}.self_attention", f"{megatron}.mlp.router"
    return [
        *blocks.gqa_params(hf, layer, bias=True),
        _vector(f"{attention}.linear_proj.bias", f"{hf_layer}.self_attn.o_proj.bias", hidden, Replicated()),
        _vector(
            f"{attention}.core_attention.softmax_offset",
            f"{hf_layer}.self_attn.sinks",
            heads,
            Dim0Sharding(heads, HEADS),
        ),
        weight(router, f"{hf_layer}.mlp.router", (count, hidden), Replicated()),
        _vector(f"{router}.bias", f"{hf_layer}.mlp.router.bias", count, Replicated()),
        *(row for expert in experts for row in _expert(hf, layer, expert)),
    ]


def _vector(megatron: str, name: str, size: int, sharding: Sharding) -> Param:
    return Param(megatron, (HFTensor(name, (size,)),), sharding, EngineSlot(name, sharding, "attention"))


def _expert(hf: HFConfig, layer: int, expert: int) -> list[Param]:
    """Return weights and biases of one expert, with the rows of gate and up alternating. SGLang has biases in FP32."""
    hidden, ffn, key = need(hf, "hidden_size"), need(hf, "intermediate_size"), "intermediate_size"
    megatron, stack = f"decoder.layers.{layer}.mlp.experts.{expert}", f"model.layers.{layer}.mlp.experts"
    by_row, by_column = Dim0Sharding(ffn, key), Dim1Sharding(ffn, key)

    def row(fc: str, name: str, shape: tuple[int, ...], sharding: Sharding, slot: str, in_engine: Sharding) -> Param:
        tensor = HFTensor(f"{stack}.{expert}.{name}", shape)
        engine_slot = EngineSlot(f"{stack}.{slot}", in_engine, "expert", is_fp32=fc.endswith(".bias"))
        return Param(f"{megatron}.{fc}", (tensor,), sharding, engine_slot, expert)

    bias, first = ExpertBiasSharding(), FirstRankSharding()
    return [
        row("linear_fc1.weight", "gate_up_proj.weight", (2 * ffn, hidden), by_row, "w13_weight", by_row),
        row("linear_fc1.bias", "gate_up_proj.bias", (2 * ffn,), bias, "w13_weight_bias", by_row),
        row("linear_fc2.weight", "down_proj.weight", (hidden, ffn), by_column, "w2_weight", by_column),
        row("linear_fc2.bias", "down_proj.bias", (hidden,), bias, "w2_weight_bias", first),
    ]


_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate_up_proj|down_proj)\.(weight|bias)")


def _stored_slice(hf: HFConfig, name: str) -> StoredSlice | None:
    """Return the part of a stack: `gate_up_proj` [experts, hidden, 2 ffn], `gate_up_proj_bias` [experts, 2 ffn], ..."""
    if (match := _EXPERT.fullmatch(name)) is None:
        return None
    stack, expert, matrix, kind = match.groups()
    if kind == "bias":
        return StoredSlice(f"{stack}.{matrix}_bias", int(expert))
    return StoredSlice(f"{stack}.{matrix}", int(expert), transposed=True)


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    _check,
    _megatron_config,
    blocks.gpt_kwargs,
    _layer,
    _num_experts,
    tool_call_parser="gpt-oss",
    extras=lambda hf: Extras(has_sinks=True, rotary=blocks.rotary(hf)),
    stored_slice=_stored_slice,
)
