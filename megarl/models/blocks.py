"""Building blocks of family tables: parameter rows and Megatron's fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import silu

from megarl.config import ConfigError
from megarl.models.config_json import need, read, rope_options
from megarl.models.layout_algebra import (
    Dim0Sharding,
    Dim1Sharding,
    EngineGrid,
    EngineKVSharding,
    EngineQKVSharding,
    EngineSlot,
    EngineVocabSharding,
    HFConfig,
    HFTensor,
    Param,
    QKVSharding,
    Replicated,
    Sharding,
    VocabSharding,
)
from megarl.models.rotary import ScaledRotary, scaled_rotary

HEADS = "num_attention_heads"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""HF's names of a gated MLP's matrices."""


def common_config(hf: HFConfig) -> dict[str, Any]:
    """Return Megatron's fields: sizes, RMSNorm, gated SiLU, no biases except in attention, no dropout."""
    return dict(
        num_layers=need(hf, "num_hidden_layers"),
        hidden_size=need(hf, "hidden_size"),
        ffn_hidden_size=need(hf, "intermediate_size"),
        num_attention_heads=need(hf, HEADS),
        normalization="RMSNorm",
        layernorm_epsilon=need(hf, "rms_norm_eps"),
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=need(hf, "initializer_range"),
    )


def gqa_config(hf: HFConfig, bias: bool = False, qk_norm: bool = False) -> dict[str, Any]:
    """Return `common_config` with grouped-query attention; see `gqa_params`."""
    return common_config(hf) | dict(
        num_query_groups=num_kv_heads(hf), kv_channels=head_dim(hf), add_qkv_bias=bias, qk_layernorm=qk_norm
    )


def require_heads(hf: HFConfig) -> None:
    """Raise ConfigError if heads do not divide, or if rotary embeddings cannot rotate them in pairs."""
    heads, kv_heads, hidden = need(hf, HEADS), num_kv_heads(hf), need(hf, "hidden_size")
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    if not read(hf, "head_dim") and hidden % heads:
        problem = f"num_attention_heads={heads} does not divide hidden_size={hidden}"
        raise ConfigError(f"config.json: {problem}, and there is no head_dim")
    rotary_dim = head_dim(hf) * rope_options(hf)["partial_rotary_factor"]
    if rotary_dim % 2:
        raise ConfigError(f"config.json: rotary embeddings turn pairs, not {rotary_dim:g} of head_dim={head_dim(hf)}")
    rotary(hf)  # raises for a type or values that are not implemented


def rotary(hf: HFConfig) -> ScaledRotary | None:
    """Return the rotary embeddings of grouped-query attention, if they are scaled."""
    return scaled_rotary(hf, int(head_dim(hf) * rope_options(hf)["partial_rotary_factor"]))


def gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    """Return arguments of GPTModel: vocabulary, length, rotary embeddings, and whether the head is tied."""
    return dict(
        vocab_size=need(hf, "vocab_size"),
        max_sequence_length=need(hf, "max_position_embeddings"),
        position_embedding_type="rope",
        rotary_base=float(rope_options(hf)["rope_theta"]),
        share_embeddings_and_output_weights=need(hf, "tie_word_embeddings"),
    )


def num_kv_heads(hf: HFConfig) -> int:
    return int(read(hf, "num_key_value_heads") or need(hf, HEADS))


def head_dim(hf: HFConfig) -> int:
    return int(read(hf, "head_dim") or need(hf, "hidden_size") // need(hf, HEADS))


def weight(
    megatron: str,
    hf: str,
    shape: tuple[int, ...],
    sharding: Sharding,
    grid: EngineGrid = "attention",
    slot: str = "",
    offset: int = 0,
) -> Param:
    """Return the parameter `<megatron>.weight` with one HF tensor, which the engine keeps and shards in the same way.

    slot, offset: the engine's tensor and the index in it, if it fuses this weight with others.
    """
    name = f"{hf}.weight"
    return Param(
        f"{megatron}.weight", (HFTensor(name, shape),), sharding, EngineSlot(slot or name, sharding, grid, offset)
    )


def embedding(hf: HFConfig, name: str = "model.embed_tokens") -> list[Param]:
    return [_vocab_weight("embedding.word_embeddings", name, hf, "embedding")]


def final_params(hf: HFConfig) -> list[Param]:
    """Return the final norm, and the output layer unless it is tied to the embedding."""
    rows = [norm("decoder.final_layernorm", "model.norm", need(hf, "hidden_size"))]
    return rows if need(hf, "tie_word_embeddings") else [*rows, _vocab_weight("output_layer", "lm_head", hf, "head")]


def _vocab_weight(megatron: str, name: str, hf: HFConfig, grid: EngineGrid) -> Param:
    tensor = HFTensor(f"{name}.weight", (need(hf, "vocab_size"), need(hf, "hidden_size")))
    slot = EngineSlot(tensor.name, EngineVocabSharding(), grid)
    return Param(f"{megatron}.weight", (tensor,), VocabSharding(), slot)


def norm(megatron: str, hf: str, size: int) -> Param:
    return weight(megatron, hf, (size,), Replicated())


def gqa_params(
    hf: HFConfig,
    layer: int,
    bias: bool = False,
    qk_norm: bool = False,
    before_mlp: str = "post_attention_layernorm",
    norm_over_heads: bool = False,
) -> list[Param]:
    """Return both norms of a layer and grouped-query attention: fused qkv and output projection.

    bias: add biases of q, k and v.
    qk_norm: add norms of q and k.
    norm_over_heads: these norms are over all heads together (`Extras.norm_over_heads`).
    before_mlp: HF's name of the second norm.
    """
    hidden, heads, size, kv_heads = need(hf, "hidden_size"), need(hf, HEADS), head_dim(hf), num_kv_heads(hf)
    megatron_layer, hf_layer = f"decoder.layers.{layer}", f"model.layers.{layer}"
    megatron_prefix, hf_prefix = f"{megatron_layer}.self_attention", f"{hf_layer}.self_attn"
    row_counts = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
    rows = [norm(f"{megatron_layer}.input_layernorm", f"{hf_layer}.input_layernorm", hidden)]
    for kind, columns in {"weight": (hidden,), **({"bias": ()} if bias else {})}.items():
        tensors = tuple(HFTensor(f"{hf_prefix}.{x}_proj.{kind}", (n, *columns)) for x, n in row_counts.items())
        slot = EngineSlot(f"{hf_prefix}.qkv_proj.{kind}", EngineQKVSharding(heads, kv_heads), "attention")
        rows.append(Param(f"{megatron_prefix}.linear_qkv.{kind}", tensors, QKVSharding(kv_heads), slot))
    if norm_over_heads:
        for x, count, key, engine in (
            ("q", heads, HEADS, Dim0Sharding(heads, HEADS)),
            ("k", kv_heads, "num_key_value_heads", EngineKVSharding(kv_heads)),
        ):
            tensor = HFTensor(f"{hf_prefix}.{x}_norm.weight", (count * size,))
            slot = EngineSlot(tensor.name, engine, "attention")
            rows.append(Param(f"{megatron_prefix}.{x}_layernorm.weight", (tensor,), Dim0Sharding(count, key), slot))
    elif qk_norm:
        rows += [norm(f"{megatron_prefix}.{x}_layernorm", f"{hf_prefix}.{x}_norm", size) for x in ("q", "k")]
    output, shape = Dim1Sharding(heads, HEADS), (hidden, heads * size)
    rows.append(weight(f"{megatron_prefix}.linear_proj", f"{hf_prefix}.o_proj", shape, output))
    rows.append(norm(f"{megatron_layer}.pre_mlp_layernorm", f"{hf_layer}.{before_mlp}", hidden))
    return rows


def dense_mlp(hf: HFConfig, layer: int) -> list[Param]:
    key, hidden = "intermediate_size", need(hf, "hidden_size")
    return gated_mlp(f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp", hidden, need(hf, key), key)


def gated_mlp(
    megatron: str,
    hf: str,
    hidden: int,
    ffn: int,
    width_key: str,
    expert: int | None = None,
    grid: EngineGrid = "mlp",
    projections: tuple[str, str, str] = PROJECTIONS,
) -> list[Param]:
    """Return a gated MLP: gate and up fused into fc1, and down as fc2.

    width_key: the config key of the width, for error messages.
    expert: index of the routed expert, if it is one.
    grid: the engine's rank group for an MLP that is not a routed expert.
    projections: HF's names of gate, up and down.
    """
    gate_up = tuple(HFTensor(f"{hf}.{name}.weight", (ffn, hidden)) for name in projections[:2])
    down = (HFTensor(f"{hf}.{projections[2]}.weight", (hidden, ffn)),)
    names = f"{hf}.gate_up_proj.weight", f"{hf}.down_proj.weight"
    if expert is not None:
        stack, grid = hf.rpartition(".")[0], "expert"  # without the expert's number
        names = f"{stack}.w13_weight", f"{stack}.w2_weight"
    return [
        Param(f"{megatron}.{fc}.weight", tensors, sharding, EngineSlot(name, sharding, grid), expert)
        for fc, tensors, sharding, name in (
            ("linear_fc1", gate_up, Dim0Sharding(ffn, width_key), names[0]),
            ("linear_fc2", down, Dim1Sharding(ffn, width_key), names[1]),
        )
    ]


def moe_params(
    layer: int,
    hidden: int,
    ffn: int,
    count: int,
    experts: Iterable[int],
    hf_mlp: str = "mlp",
    projections: tuple[str, str, str] = PROJECTIONS,
    width_key: str = "moe_intermediate_size",
) -> list[Param]:
    """Return a layer's router weight and the routed experts `experts`, out of `count`.

    hf_mlp, projections: HF's names of the layer's MLP and of an expert's matrices. width_key: see `gated_mlp`.
    """
    megatron, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.{hf_mlp}"
    rows = [weight(f"{megatron}.router", f"{hf}.gate", (count, hidden), Replicated())]
    for e in experts:
        names = f"{megatron}.experts.{e}", f"{hf}.experts.{e}"
        rows += gated_mlp(*names, hidden, ffn, width_key, e, projections=projections)
    return rows


def router_bias(layer: int, tensor: HFTensor, slot_name: str = "") -> Param:
    """Return a router's balancing bias, which chooses experts and is not trained. It is FP32 everywhere.

    slot_name: the engine's name of it, if it differs from HF's.
    """
    slot = EngineSlot(slot_name or tensor.name, Replicated(), "attention")
    name = f"decoder.layers.{layer}.mlp.router.expert_bias"
    return Param(name, (tensor,), Replicated(), slot, dtype=torch.float32, is_buffer=True)


def with_fp32_router(rows: Iterable[Param]) -> list[Param]:
    """Return the rows with the engine's router weight in FP32, as SGLang keeps it for some models."""
    return [
        replace(row, slot=replace(row.slot, is_fp32=True))
        if row.slot and row.megatron.endswith(".router.weight")
        else row
        for row in rows
    ]
