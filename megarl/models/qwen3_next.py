"""Qwen3-Next and Qwen3.5: gated delta nets in most layers and gated attention in the others.

A gated delta net (arXiv:2412.06464) is a linear attention: each value head keeps a matrix as its state, decays it by
exp(g) and corrects it by the delta rule for each token. Queries, keys and values first pass a short causal convolution.
Attention rotates a quarter of each head, and a sigmoid gate multiplies its output. Norms multiply by 1 + w, except the
norm of the delta net's output. Experts have softmax routing and a shared expert with a gate of its own. The layer of
multi-token prediction has attention, never a delta net.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.config import ConfigError, strict
from megarl.config.strict import PositiveInt
from megarl.models import blocks, config_json
from megarl.models.blocks import HEADS, norm, weight
from megarl.models.config_json import Experts, Few, Heads, Size, need, rope_options
from megarl.models.family import Extras, Family, StoredSlice
from megarl.models.layout_algebra import (
    Dim0Sharding,
    Dim1Sharding,
    EngineQKVSharding,
    EngineSlot,
    GatedQKVSharding,
    HFConfig,
    HFTensor,
    Param,
    Replicated,
    Section,
    SectionSharding,
)

LINEAR, FULL = "linear_attention", "full_attention"
KEY_HEADS, VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
MTP_KEYS = "mtp_num_hidden_layers", "num_nextn_predict_layers"
"""Keys of the number of multi-token prediction layers: that of published Qwen3.5, and SGLang's and vLLM's own.

transformers reads neither, and published Qwen3-Next has neither.
"""

_FIELDS: dict[str, Any] = {
    **dict.fromkeys((KEY_HEADS, VALUE_HEADS, "num_key_value_heads"), Heads),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), Size),
    **dict.fromkeys(("linear_conv_kernel_dim", "full_attention_interval"), PositiveInt),
    **dict.fromkeys(MTP_KEYS, Few),
    "mtp_use_dedicated_embeddings": bool,
}
_MOE_FIELDS: dict[str, Any] = {
    **_FIELDS,
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), Experts),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), Size),
    "norm_topk_prob": bool,
}


def _layer_types(hf: HFConfig) -> list[str]:
    """Return the type of each layer: full attention in every n-th. SGLang has no other order."""
    return [LINEAR if _is_linear(hf, layer) else FULL for layer in range(need(hf, "num_hidden_layers"))]


def _is_linear(hf: HFConfig, layer: int) -> bool:
    """Return whether a layer has a gated delta net instead of attention. Layers past the decoder, MTP's, have none."""
    if layer >= need(hf, "num_hidden_layers"):
        return False
    types = hf.get("layer_types")
    if types and hf.get("full_attention_interval") is None:
        interval = [*types, FULL].index(FULL) + 1
    else:
        interval = need(hf, "full_attention_interval")
    return bool((layer + 1) % interval)


_MROPE = "mrope_section", "mrope_interleaved"


def _without_mrope(hf: HFConfig) -> HFConfig:
    """Return Qwen3.5's config.json without options for images, in which a token's three positions differ.

    Raises ConfigError for those that SGLang does not accept.
    """
    blocks_by_name = {name: hf[name] for name in ("rope_scaling", "rope_parameters") if isinstance(hf.get(name), dict)}
    for name, block in blocks_by_name.items():
        if (section := block.get(_MROPE[0])) is None:
            continue
        strict.check_value(section, list[int], f"config.json: {name}.mrope_section")
        share = rope_options(hf)["partial_rotary_factor"]
        strict.check_value(share, float, f"config.json: {name}.partial_rotary_factor")
        pairs = blocks.head_dim(hf) * share / 2
        if len(section) != 3 or min(section) < 0 or sum(section) != pairs:
            raise ConfigError(f"config.json: mrope_section={section} must be three numbers with the sum {pairs:g}")
        config_json.require_default_rope(hf, "SGLang scales rotary embeddings with mrope_section in another class")
    cleaned = {name: {k: v for k, v in block.items() if k not in _MROPE} for name, block in blocks_by_name.items()}
    return {**hf, **cleaned}


def _check_3_5(hf: HFConfig) -> None:
    _check(_without_mrope(hf), _FIELDS)


def _check_3_5_moe(hf: HFConfig) -> None:
    _check_moe(_without_mrope(hf))


def _check(hf: HFConfig, fields: dict[str, Any]) -> None:
    config_json.require_types(hf, fields)
    if hf.get("quantization_config") is not None:
        raise ConfigError(
            "config.json: quantization_config is not implemented for gated delta nets: FP8 checkpoints have the inputs "
            "of gates and decays in BF16, which Megatron keeps in one matrix with the rest; convert it to bfloat16"
        )
    config_json.require_common(hf, partial_rotary=True, layer_types=_layer_types(hf))
    blocks.require_heads(hf)
    config_json.require(hf, "attention_bias", False)
    config_json.require(hf, "attn_output_gate", True)
    config_json.require(hf, "is_causal", True)
    config_json.require(hf, "output_gate_type", None, ("silu", "swish"))
    config_json.require_same(hf, *MTP_KEYS)
    for key in MTP_KEYS:
        config_json.require(hf, key, 0, (1,))  # SGLang's draft model has one layer
    config_json.require(hf, "mtp_use_dedicated_embeddings", False)
    keys, values = need(hf, KEY_HEADS), need(hf, VALUE_HEADS)
    if values % keys:
        raise ConfigError(f"config.json: {KEY_HEADS}={keys} does not divide {VALUE_HEADS}={values}")


def _check_moe(hf: HFConfig) -> None:
    _check(hf, _MOE_FIELDS)
    config_json.require_experts(hf, need(hf, "num_experts"))
    config_json.require(hf, "decoder_sparse_step", 1)
    config_json.require(hf, "mlp_only_layers", [], (None,))
    config_json.require(hf, "n_shared_experts", 1, (None,))
    config_json.require(hf, "norm_topk_prob", True)
    if need(hf, "num_experts_per_tok") == 1:
        # The single expert's weight would always be 1, so the router could not learn. Megatron rejects it too.
        raise ConfigError("config.json: norm_topk_prob=True with num_experts_per_tok=1 is not implemented")


def _check_next(hf: HFConfig) -> None:
    need(hf, "intermediate_size")
    _check_moe(hf)


def _attention_config(hf: HFConfig) -> dict[str, Any]:
    return dict(
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(kind == LINEAR) for kind in _layer_types(hf)],
        linear_conv_kernel_dim=need(hf, "linear_conv_kernel_dim"),
        linear_key_head_dim=need(hf, "linear_key_head_dim"),
        linear_value_head_dim=need(hf, "linear_value_head_dim"),
        linear_num_key_heads=need(hf, KEY_HEADS),
        linear_num_value_heads=need(hf, VALUE_HEADS),
    )


def _moe_config(hf: HFConfig) -> dict[str, Any]:
    _check_moe(_without_mrope(hf))
    # No layer has an MLP of intermediate_size, and Qwen3.5 does not have the key.
    sized = {"intermediate_size": need(hf, "moe_intermediate_size"), **hf}
    return {
        **blocks.gqa_config(sized, qk_norm=True),
        **_attention_config(hf),
        "num_moe_experts": need(hf, "num_experts"),
        "moe_ffn_hidden_size": need(hf, "moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": need(hf, "shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
        "moe_router_topk": need(hf, "num_experts_per_tok"),
        # The softmax after the top-k is the softmax before it, normalised over the chosen experts.
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _extras(hf: HFConfig) -> Extras:
    return Extras(rotary=blocks.rotary(hf))


def _dense_config(hf: HFConfig) -> dict[str, Any]:
    _check_3_5(hf)
    return blocks.gqa_config(hf, qk_norm=True) | _attention_config(hf)


def _gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    return blocks.gpt_kwargs(hf) | dict(rotary_percent=float(rope_options(hf)["partial_rotary_factor"]))


# --- attention -------------------------------------------------------------------------------------------------------


def _gated_attention(hf: HFConfig, megatron: str, hf_layer: str) -> list[Param]:
    """Return attention whose query projection has a gate after the query of each head.

    SGLang's decoder layer has the attention's weights itself, without a module for it.
    """
    hidden, heads, kv_heads, size = (
        need(hf, "hidden_size"),
        need(hf, HEADS),
        blocks.num_kv_heads(hf),
        blocks.head_dim(hf),
    )
    row_counts = {"q": 2 * heads * size, "k": kv_heads * size, "v": kv_heads * size}
    tensors = tuple(HFTensor(f"{hf_layer}.self_attn.{x}_proj.weight", (n, hidden)) for x, n in row_counts.items())
    qkv = EngineSlot(f"{hf_layer}.qkv_proj.weight", EngineQKVSharding(heads, kv_heads), "attention")
    output = f"{megatron}.linear_proj", f"{hf_layer}.self_attn.o_proj"
    by_head = Dim1Sharding(heads, HEADS)
    return [
        Param(f"{megatron}.linear_qkv.weight", tensors, GatedQKVSharding(heads, kv_heads), qkv),
        *(
            weight(
                f"{megatron}.{x}_layernorm",
                f"{hf_layer}.self_attn.{x}_norm",
                (size,),
                Replicated(),
                slot=f"{hf_layer}.{x}_norm.weight",
            )
            for x in ("q", "k")
        ),
        weight(*output, (hidden, heads * size), by_head, slot=f"{hf_layer}.o_proj.weight"),
    ]


_SECTIONS = {"q": "query", "k": "key", "v": "value", "z": "z", "b": "beta", "a": "alpha"}
"""Names of the sections of the input projection in Megatron's checkpoints."""


def _delta_net(hf: HFConfig, megatron: str, hf_layer: str, grouped: bool) -> list[Param]:
    """Return a gated delta net.

    Megatron's input projection has the rows [q, k, v, z, b, a] of a rank's heads: queries, keys, values, output gates,
    and for each value head the inputs of its write strength (b, Megatron's beta) and of its decay (a, alpha).

    grouped: whether the checkpoint has q, k, v, z and b, a of each key head together, as Qwen3-Next's, and not one
    after the other, as Qwen3.5's.
    """
    hidden, keys, values = need(hf, "hidden_size"), need(hf, KEY_HEADS), need(hf, VALUE_HEADS)
    key_size, value_size = need(hf, "linear_key_head_dim"), need(hf, "linear_value_head_dim")
    ratio = values // keys  # value heads per key head
    prefix = f"{hf_layer}.linear_attn"
    by_head = partial(SectionSharding, keys, KEY_HEADS)
    sizes = {"q": key_size, "k": key_size, "v": ratio * value_size, "z": ratio * value_size, "b": ratio, "a": ratio}

    def in_groups(source: int, names: str) -> dict[str, Section]:
        """Return sections that alternate within a source: a part of each, key head after key head."""
        stride, first, sections = sum(sizes[name] for name in names), 0, {}
        for name in names:
            sections[name] = Section(source, first, sizes[name], stride, _SECTIONS[name])
            first += sizes[name]
        return sections

    def in_turn(source: int, names: str) -> dict[str, Section]:
        """Return sections that follow each other within a source."""
        first, sections = 0, {}
        for name in names:
            sections[name] = Section(source, first, sizes[name], sizes[name], _SECTIONS[name])
            first += keys * sizes[name]
        return sections

    if grouped:
        stored = {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}
        rows = {
            name: section
            for source, names in enumerate(stored.values())
            for name, section in in_groups(source, names).items()
        }
        # The engine keeps the rows as they are stored.
        engine_rows = [
            [Section(source, 0, size, size)]
            for source, names in enumerate(stored.values())
            for size in [sum(sizes[n] for n in names)]
        ]
    else:
        stored = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"}
        rows = {
            name: section
            for source, names in enumerate(stored.values())
            for name, section in in_turn(source, names).items()
        }
        engine_rows = [[rows[name] for name in names] for names in ("qkvz", "ba")]
    tensors = tuple(
        HFTensor(f"{prefix}.{name}.weight", (keys * sum(sizes[x] for x in names), hidden))
        for name, names in stored.items()
    )
    slots = tuple(
        EngineSlot(f"{prefix}.{name}.weight", by_head(tuple(sections)), "attention")
        for name, sections in zip(("in_proj_qkvz", "in_proj_ba"), engine_rows, strict=True)
    )
    convolved = by_head(tuple(in_turn(0, "qkv").values()))
    by_value_head = by_head((Section(0, 0, ratio, ratio),))
    kernel = (keys * (2 * key_size + ratio * value_size), 1, need(hf, "linear_conv_kernel_dim"))
    output = f"{megatron}.out_proj", f"{prefix}.out_proj"

    def vector(name: str, is_fp32: bool = False) -> Param:
        tensor = HFTensor(f"{prefix}.{name}", (values,))
        slot = EngineSlot(tensor.name, by_value_head, "attention", is_fp32=is_fp32)
        return Param(f"{megatron}.{name}", (tensor,), by_value_head, slot)

    return [
        Param(
            f"{megatron}.in_proj.weight",
            tensors,
            by_head(tuple(rows[x] for x in "qkvzba")),
            slots[0],
            more_slots=slots[1:],
        ),
        weight(f"{megatron}.conv1d", f"{prefix}.conv1d", kernel, convolved),
        vector("dt_bias"),
        vector("A_log", is_fp32=True),
        norm(f"{megatron}.out_norm", f"{prefix}.norm", value_size),
        weight(*output, (hidden, values * value_size), Dim1Sharding(keys, KEY_HEADS)),
    ]


# --- layers ----------------------------------------------------------------------------------------------------------


def _layer(hf: HFConfig, layer: int, mlp: list[Param], grouped: bool) -> list[Param]:
    """Return the table of a layer with the given MLP."""
    rows = _decoder_layer(hf, layer, mlp, grouped)
    return rows if layer < need(hf, "num_hidden_layers") else _mtp_layer(hf, layer, rows)


def _decoder_layer(hf: HFConfig, layer: int, mlp: list[Param], grouped: bool) -> list[Param]:
    megatron, hf_layer, hidden = f"decoder.layers.{layer}", f"model.layers.{layer}", need(hf, "hidden_size")
    attention = f"{megatron}.self_attention", hf_layer
    return [
        norm(f"{megatron}.input_layernorm", f"{hf_layer}.input_layernorm", hidden),
        *(_delta_net(hf, *attention, grouped) if _is_linear(hf, layer) else _gated_attention(hf, *attention)),
        norm(f"{megatron}.pre_mlp_layernorm", f"{hf_layer}.post_attention_layernorm", hidden),
        *mlp,
    ]


def _moe_layer(hf: HFConfig, layer: int, experts: Iterable[int], grouped: bool) -> list[Param]:
    hidden, ffn, key = need(hf, "hidden_size"), need(hf, "moe_intermediate_size"), "shared_expert_intermediate_size"
    megatron, hf_mlp = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    gate = HFTensor(f"{hf_mlp}.shared_expert_gate.weight", (1, hidden))
    names = f"{megatron}.shared_experts", f"{hf_mlp}.shared_expert"
    mlp = [
        *blocks.moe_params(layer, hidden, ffn, need(hf, "num_experts"), experts),
        *blocks.gated_mlp(*names, hidden, need(hf, key), key, grid="shared"),
        Param(
            f"{megatron}.shared_experts.gate_weight",
            (gate,),
            Replicated(),
            EngineSlot(gate.name, Replicated(), "attention"),
        ),
    ]
    return _layer(hf, layer, mlp, grouped)


def _dense_layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    return _layer(hf, layer, blocks.dense_mlp(hf, layer), grouped=False)


def num_mtp_layers(hf: HFConfig) -> int:
    return max(int(hf.get(key) or 0) for key in MTP_KEYS)


def _mtp_layer(hf: HFConfig, layer: int, rows: list[Param]) -> list[Param]:
    """Return the table of a multi-token prediction layer, whose embedding and head are the model's own.

    The engine keeps it in a draft model of one layer. Its joint projection sees the embedding before the state, as
    Megatron's does.

    rows: of a decoder layer with this number.
    """
    hidden, number = need(hf, "hidden_size"), layer - need(hf, "num_hidden_layers")
    megatron, decoder, inner = f"mtp.layers.{number}", f"decoder.layers.{layer}.", f"model.layers.{layer}."
    norms = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "final_layernorm": "norm"}
    slots = {"norm": "model.norm.weight"}  # of those that the draft model has in a module
    result = [
        weight(f"{megatron}.{name}", f"mtp.{own}", (hidden,), Replicated(), slot=slots.get(own, f"{own}.weight"))
        for name, own in norms.items()
    ]
    joint = weight(f"{megatron}.eh_proj", "mtp.fc", (hidden, 2 * hidden), Replicated(), slot="fc.weight")
    result.append(replace(joint, sharding=Dim0Sharding(hidden, "hidden_size")))
    for row in rows:
        assert row.slot is not None
        name = row.megatron.replace(decoder, f"{megatron}.transformer_layer.")
        tensors = tuple(tensor._replace(name=tensor.name.replace(inner, f"mtp.layers.{number}.")) for tensor in row.hf)
        slot = replace(row.slot, name=row.slot.name.replace(inner, f"model.layers.{number}."))
        result.append(replace(row, megatron=name, hf=tensors, slot=slot))
    return [replace(row, slot=replace(row.slot, is_draft=True)) for row in result if row.slot is not None]


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def _stored_slice(hf: HFConfig, name: str) -> StoredSlice | None:
    """Return where published checkpoints of Qwen3.5 have an expert: in stacks [experts, out, in], gate above up."""
    if (match := _EXPERT.fullmatch(name)) is None:
        return None
    stack, expert, matrix = match[1], int(match[2]), match[3]
    if matrix == "down":
        return StoredSlice(f"{stack}.down_proj", expert)
    ffn = need(hf, "moe_intermediate_size")
    return StoredSlice(f"{stack}.gate_up_proj", expert, slice(0, ffn) if matrix == "gate" else slice(ffn, 2 * ffn))


def _num_experts(hf: HFConfig) -> int:
    return int(need(hf, "num_experts"))


QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    _check_next,
    _moe_config,
    _gpt_kwargs,
    partial(_moe_layer, grouped=True),
    _num_experts,
    tool_call_parser="qwen25",
    extras=_extras,
    untrained_prefixes=lambda hf: ("mtp.",),
    num_mtp_layers=num_mtp_layers,
)
QWEN3_5_MOE = Family(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    _check_3_5_moe,
    _moe_config,
    _gpt_kwargs,
    partial(_moe_layer, grouped=False),
    _num_experts,
    tool_call_parser="qwen3_coder",
    extras=_extras,
    untrained_prefixes=lambda hf: ("mtp.",),
    num_mtp_layers=num_mtp_layers,
    mtp_key=MTP_KEYS[0],
    stored_slice=_stored_slice,
)
QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    _check_3_5,
    _dense_config,
    _gpt_kwargs,
    _dense_layer,
    lambda hf: 0,
    tool_call_parser="qwen3_coder",
    extras=_extras,
    untrained_prefixes=lambda hf: ("mtp.",),
    num_mtp_layers=num_mtp_layers,
    mtp_key=MTP_KEYS[0],
)
