"""What the tables of several families share: rows, Megatron's fields, and the check that a table divides."""

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
    """The same table; raises ConfigError for the first tensor that `tp`, or of an expert `etp`, does not divide."""
    for param in params:
        split_param(param, tp if param.expert is None else etp, 0)
    return params


def common_config(hf: HFConfig) -> dict[str, Any]:
    """Fields of Megatron's configuration: sizes, RMSNorm, gated SiLU, no biases but of attention, no dropout."""
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
    """`common_config` with grouped-query attention; see `gqa_params`."""
    return common_config(hf) | dict(
        num_query_groups=num_kv_heads(hf), kv_channels=head_dim(hf), add_qkv_bias=bias, qk_layernorm=qk_norm
    )


def require_heads(hf: HFConfig) -> None:
    """Refuse heads that do not divide, and those that rotary embeddings cannot turn in pairs."""
    heads, hidden = need(hf, "num_attention_heads"), need(hf, "hidden_size")
    if heads % num_kv_heads(hf):
        raise ConfigError(
            f"config.json: num_key_value_heads={num_kv_heads(hf)} does not divide num_attention_heads={heads}"
        )
    if not read(hf, "head_dim") and hidden % heads:
        raise ConfigError(
            f"config.json: num_attention_heads={heads} does not divide hidden_size={hidden}, and there is no head_dim"
        )
    turned = head_dim(hf) * rope_options(hf)["partial_rotary_factor"]
    if turned % 2:
        raise ConfigError(f"config.json: rotary embeddings turn pairs, not {turned:g} of head_dim={head_dim(hf)}")


def gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    """Arguments of Megatron's GPTModel: vocabulary, length, rotary embeddings, and whether the head is tied."""
    return dict(
        vocab_size=need(hf, "vocab_size"),
        max_sequence_length=need(hf, "max_position_embeddings"),
        position_embedding_type="rope",
        rotary_base=float(rope_options(hf)["rope_theta"]),
        share_embeddings_and_output_weights=has_tied_embeddings(hf),
    )


def num_kv_heads(hf: HFConfig) -> int:
    """Key-value heads."""
    return int(read(hf, "num_key_value_heads") or need(hf, "num_attention_heads"))


def head_dim(hf: HFConfig) -> int:
    return int(read(hf, "head_dim") or need(hf, "hidden_size") // need(hf, "num_attention_heads"))


def simple_param(
    megatron: str,
    hf: str,
    shape: tuple[int, ...],
    cut: Sharding,
    grid: EngineGrid = "attention",
    slot: str = "",
    at: int = 0,
) -> Param:
    """A parameter made of one HF tensor, which the engine keeps under that name and cuts the same way."""
    return Param(megatron, (HFTensor(hf, shape),), cut, EngineSlot(slot or hf, cut, grid, at))


def embedding(hf: HFConfig) -> list[Param]:
    shape = (need(hf, "vocab_size"), need(hf, "hidden_size"))
    return [_vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight", shape, "embedding")]


def final_params(hf: HFConfig) -> list[Param]:
    """Final norm, and the output layer unless it is the embedding's weight again."""
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
    """Both norms of a layer and grouped-query attention between them: fused qkv, output projection, optionally biases
    of qkv and norms of q and k. `before_mlp`: HF's name of the second norm."""
    hidden, heads, size, shared = (
        need(hf, "hidden_size"),
        need(hf, "num_attention_heads"),
        head_dim(hf),
        num_kv_heads(hf),
    )
    layer_here, layer_there = f"decoder.layers.{layer}", f"model.layers.{layer}"
    ours, theirs = f"{layer_here}.self_attention", f"{layer_there}.self_attn"
    sizes = {"q": heads * size, "k": shared * size, "v": shared * size}
    engine, cut = EngineQKVSharding(heads, shared), QKVSharding(shared)
    weights = tuple(HFTensor(f"{theirs}.{x}_proj.weight", (rows, hidden)) for x, rows in sizes.items())
    slot = EngineSlot(f"{theirs}.qkv_proj.weight", engine, "attention")
    rows = [norm(f"{layer_here}.input_layernorm", f"{layer_there}.input_layernorm", hidden)]
    rows.append(Param(f"{ours}.linear_qkv.weight", weights, cut, slot))
    if bias:
        biases = tuple(HFTensor(f"{theirs}.{x}_proj.bias", (rows,)) for x, rows in sizes.items())
        slot = EngineSlot(f"{theirs}.qkv_proj.bias", engine, "attention")
        rows.append(Param(f"{ours}.linear_qkv.bias", biases, cut, slot))
    if qk_norm:
        rows += [norm(f"{ours}.{x}_layernorm", f"{theirs}.{x}_norm", size) for x in ("q", "k")]
    output = Dim1Sharding(heads, "num_attention_heads")
    rows.append(simple_param(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", (hidden, heads * size), output))
    rows.append(norm(f"{layer_here}.pre_mlp_layernorm", f"{layer_there}.{before_mlp}", hidden))
    return rows


def gated_mlp(
    megatron: str, hf: str, hidden: int, ffn: int, of: str, expert: int | None = None, grid: EngineGrid = "mlp"
) -> list[Param]:
    """Gate and up fused into fc1, and down. `of` is the config key that gives the width, for error messages; `grid` how
    the engine divides one that is no routed expert."""
    gate_up = tuple(HFTensor(f"{hf}.{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
    down = (HFTensor(f"{hf}.down_proj.weight", (hidden, ffn)),)
    both, back = GateUpSharding(ffn, of), Dim1Sharding(ffn, of)
    if expert is None:
        slots = [EngineSlot(f"{hf}.gate_up_proj.weight", both, grid), EngineSlot(f"{hf}.down_proj.weight", back, grid)]
    else:
        stack = hf.rpartition(".")[0]  # without the expert's number
        slots = [EngineSlot(f"{stack}.w13_weight", both, "expert"), EngineSlot(f"{stack}.w2_weight", back, "expert")]
    return [
        Param(f"{megatron}.linear_fc1.weight", gate_up, both, slots[0], expert),
        Param(f"{megatron}.linear_fc2.weight", down, back, slots[1], expert),
    ]


def moe_params(layer: int, hidden: int, ffn: int, count: int, wanted: Iterable[int]) -> list[Param]:
    """The router's weight and the `wanted` ones of the routed experts of a layer, of which there are `count`."""
    megatron, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    rows = [simple_param(f"{megatron}.router.weight", f"{hf}.gate.weight", (count, hidden), Replicated())]
    for e in wanted:
        rows += gated_mlp(f"{megatron}.experts.{e}", f"{hf}.experts.{e}", hidden, ffn, "moe_intermediate_size", e)
    return rows
