"""Building blocks of family tables: parameter rows, Megatron's fields, and the divisibility check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn.functional import silu

from megarl.config import ConfigError
from megarl.models.config_json import has_tied_embeddings, need, read, rope_options
from megarl.models.layout_algebra import (
    Dim1Sharding,
    EngineGrid,
    EngineQKVSharding,
    EngineSlot,
    EngineVocabSharding,
    GateUpSharding,
    HFConfig,
    HFTensor,
    Param,
    QKVSharding,
    Replicated,
    Sharding,
    VocabSharding,
    split_param,
)


def check_divisible(params: list[Param], tp: int, etp: int) -> list[Param]:
    """Return the table. Raise ConfigError for the first tensor that `tp`, or `etp` for experts, does not divide."""
    for param in params:
        split_param(param, tp if param.expert is None else etp, 0)
    return params


def common_config(hf: HFConfig) -> dict[str, Any]:
    """Return Megatron's fields: sizes, RMSNorm, gated SiLU, no biases except in attention, no dropout."""
    return dict(
        num_layers=need(hf, "num_hidden_layers"),
        hidden_size=need(hf, "hidden_size"),
        ffn_hidden_size=need(hf, "intermediate_size"),
        num_attention_heads=need(hf, "num_attention_heads"),
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
    heads, hidden = need(hf, "num_attention_heads"), need(hf, "hidden_size")
    if heads % num_kv_heads(hf):
        raise ConfigError(
            f"config.json: num_key_value_heads={num_kv_heads(hf)} does not divide num_attention_heads={heads}"
        )
    if not read(hf, "head_dim") and hidden % heads:
        raise ConfigError(
            f"config.json: num_attention_heads={heads} does not divide hidden_size={hidden}, and there is no head_dim"
        )
    rotary_dim = head_dim(hf) * rope_options(hf)["partial_rotary_factor"]
    if rotary_dim % 2:
        raise ConfigError(f"config.json: rotary embeddings turn pairs, not {rotary_dim:g} of head_dim={head_dim(hf)}")


def gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    """Return arguments of GPTModel: vocabulary, length, rotary embeddings, and whether the head is tied."""
    return dict(
        vocab_size=need(hf, "vocab_size"),
        max_sequence_length=need(hf, "max_position_embeddings"),
        position_embedding_type="rope",
        rotary_base=float(rope_options(hf)["rope_theta"]),
        share_embeddings_and_output_weights=has_tied_embeddings(hf),
    )


def num_kv_heads(hf: HFConfig) -> int:
    """Return the number of key-value heads."""
    return int(read(hf, "num_key_value_heads") or need(hf, "num_attention_heads"))


def head_dim(hf: HFConfig) -> int:
    return int(read(hf, "head_dim") or need(hf, "hidden_size") // need(hf, "num_attention_heads"))


def simple_param(
    megatron: str,
    hf: str,
    shape: tuple[int, ...],
    sharding: Sharding,
    grid: EngineGrid = "attention",
    slot: str = "",
    at: int = 0,
) -> Param:
    """Return a parameter with one HF tensor, which the engine keeps under that name and shards in the same way."""
    return Param(megatron, (HFTensor(hf, shape),), sharding, EngineSlot(slot or hf, sharding, grid, at))


def embedding(hf: HFConfig) -> list[Param]:
    shape = (need(hf, "vocab_size"), need(hf, "hidden_size"))
    return [_vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight", shape, "embedding")]


def final_params(hf: HFConfig) -> list[Param]:
    """Return the final norm, and the output layer unless it is tied to the embedding."""
    vocab, hidden = need(hf, "vocab_size"), need(hf, "hidden_size")
    rows = [simple_param("decoder.final_layernorm.weight", "model.norm.weight", (hidden,), Replicated())]
    if not has_tied_embeddings(hf):
        rows.append(_vocab("output_layer.weight", "lm_head.weight", (vocab, hidden), "head"))
    return rows


def _vocab(megatron: str, hf: str, shape: tuple[int, int], grid: EngineGrid) -> Param:
    return Param(megatron, (HFTensor(hf, shape),), VocabSharding(), EngineSlot(hf, EngineVocabSharding(), grid))


def norm(megatron: str, hf: str, size: int) -> Param:
    return simple_param(f"{megatron}.weight", f"{hf}.weight", (size,), Replicated())


def gqa_params(
    hf: HFConfig,
    layer: int,
    bias: bool = False,
    qk_norm: bool = False,
    before_mlp: str = "post_attention_layernorm",
) -> list[Param]:
    """Return both norms of a layer and grouped-query attention: fused qkv and output projection.

    bias: add biases of q, k and v.
    qk_norm: add norms of q and k.
    before_mlp: HF's name of the second norm.
    """
    hidden, heads, size, kv_heads = (
        need(hf, "hidden_size"),
        need(hf, "num_attention_heads"),
        head_dim(hf),
        num_kv_heads(hf),
    )
    megatron_layer, hf_layer = f"decoder.layers.{layer}", f"model.layers.{layer}"
    megatron_prefix, hf_prefix = f"{megatron_layer}.self_attention", f"{hf_layer}.self_attn"
    sizes = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
    engine_sharding, sharding = EngineQKVSharding(heads, kv_heads), QKVSharding(kv_heads)
    weights = tuple(HFTensor(f"{hf_prefix}.{x}_proj.weight", (rows, hidden)) for x, rows in sizes.items())
    slot = EngineSlot(f"{hf_prefix}.qkv_proj.weight", engine_sharding, "attention")
    rows = [norm(f"{megatron_layer}.input_layernorm", f"{hf_layer}.input_layernorm", hidden)]
    rows.append(Param(f"{megatron_prefix}.linear_qkv.weight", weights, sharding, slot))
    if bias:
        biases = tuple(HFTensor(f"{hf_prefix}.{x}_proj.bias", (rows,)) for x, rows in sizes.items())
        slot = EngineSlot(f"{hf_prefix}.qkv_proj.bias", engine_sharding, "attention")
        rows.append(Param(f"{megatron_prefix}.linear_qkv.bias", biases, sharding, slot))
    if qk_norm:
        rows += [norm(f"{megatron_prefix}.{x}_layernorm", f"{hf_prefix}.{x}_norm", size) for x in ("q", "k")]
    output = Dim1Sharding(heads, "num_attention_heads")
    rows.append(
        simple_param(
            f"{megatron_prefix}.linear_proj.weight", f"{hf_prefix}.o_proj.weight", (hidden, heads * size), output
        )
    )
    rows.append(norm(f"{megatron_layer}.pre_mlp_layernorm", f"{hf_layer}.{before_mlp}", hidden))
    return rows


def gated_mlp(
    megatron: str, hf: str, hidden: int, ffn: int, width_key: str, expert: int | None = None, grid: EngineGrid = "mlp"
) -> list[Param]:
    """Return a gated MLP: gate and up fused into fc1, and down as fc2.

    width_key: the config key of the width, for error messages.
    expert: index of the routed expert, if it is one.
    grid: the engine's rank group for an MLP that is not a routed expert.
    """
    gate_up = tuple(HFTensor(f"{hf}.{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
    down = (HFTensor(f"{hf}.down_proj.weight", (hidden, ffn)),)
    gate_up_sharding, down_sharding = GateUpSharding(ffn, width_key), Dim1Sharding(ffn, width_key)
    if expert is None:
        slots = [
            EngineSlot(f"{hf}.gate_up_proj.weight", gate_up_sharding, grid),
            EngineSlot(f"{hf}.down_proj.weight", down_sharding, grid),
        ]
    else:
        stack = hf.rpartition(".")[0]  # without the expert's number
        slots = [
            EngineSlot(f"{stack}.w13_weight", gate_up_sharding, "expert"),
            EngineSlot(f"{stack}.w2_weight", down_sharding, "expert"),
        ]
    return [
        Param(f"{megatron}.linear_fc1.weight", gate_up, gate_up_sharding, slots[0], expert),
        Param(f"{megatron}.linear_fc2.weight", down, down_sharding, slots[1], expert),
    ]


def moe_params(layer: int, hidden: int, ffn: int, count: int, experts: Iterable[int]) -> list[Param]:
    """Return a layer's router weight and the routed experts `experts`, out of `count`."""
    megatron, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    rows = [simple_param(f"{megatron}.router.weight", f"{hf}.gate.weight", (count, hidden), Replicated())]
    for e in experts:
        rows += gated_mlp(f"{megatron}.experts.{e}", f"{hf}.experts.{e}", hidden, ffn, "moe_intermediate_size", e)
    return rows
