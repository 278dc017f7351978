"""The rows that the tables of several families share, and the check that a table divides."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.models.layout import (
    Columns,
    Cut,
    EngineGrid,
    EngineQkv,
    EngineVocab,
    GateUp,
    HFConfig,
    HFTensor,
    Param,
    Qkv,
    Replicated,
    Slot,
    Vocab,
    pieces,
)
from megarl.models.options import need


def checked(params: list[Param], tp: int) -> list[Param]:
    """The same table; raises ConfigError for the first tensor that `tp` does not divide."""
    for param in params:
        pieces(param, tp, 0)
    return params


def one(
    megatron: str,
    hf: str,
    shape: tuple[int, ...],
    cut: Cut,
    grid: EngineGrid = "attention",
    slot: str = "",
    at: int = 0,
) -> Param:
    """A parameter made of one HF tensor, which the engine keeps under that name and cuts the same way."""
    return Param(megatron, (HFTensor(hf, shape),), cut, Slot(slot or hf, cut, grid, at))


def embedding(hf: HFConfig) -> list[Param]:
    shape = (need(hf, "vocab_size"), need(hf, "hidden_size"))
    return [_vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight", shape, "embedding")]


def final(hf: HFConfig) -> list[Param]:
    """Final norm, and the output layer unless it is the embedding's weight again."""
    vocab, hidden = need(hf, "vocab_size"), need(hf, "hidden_size")
    rows = [one("decoder.final_layernorm.weight", "model.norm.weight", (hidden,), Replicated())]
    if not hf.get("tie_word_embeddings", False):
        rows.append(_vocab("output_layer.weight", "lm_head.weight", (vocab, hidden), "head"))
    return rows


def _vocab(megatron: str, hf: str, shape: tuple[int, int], grid: EngineGrid) -> Param:
    return Param(megatron, (HFTensor(hf, shape),), Vocab(), Slot(hf, EngineVocab(), grid))


def norm(megatron: str, hf: str, size: int) -> Param:
    return one(f"{megatron}.weight", f"{hf}.weight", (size,), Replicated())


def grouped_attention(
    layer: int, hidden: int, heads: int, groups: int, head_dim: int, bias: bool = False, qk_norm: bool = False
) -> list[Param]:
    """Grouped-query attention: fused qkv, output projection, optionally biases of qkv and norms of q and k."""
    megatron, hf = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    sizes = {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}
    engine = EngineQkv(heads, groups)
    weights = tuple(HFTensor(f"{hf}.{x}_proj.weight", (rows, hidden)) for x, rows in sizes.items())
    slot = Slot(f"{hf}.qkv_proj.weight", engine, "attention")
    rows = [Param(f"{megatron}.linear_qkv.weight", weights, Qkv(groups), slot)]
    if bias:
        biases = tuple(HFTensor(f"{hf}.{x}_proj.bias", (rows,)) for x, rows in sizes.items())
        slot = Slot(f"{hf}.qkv_proj.bias", engine, "attention")
        rows.append(Param(f"{megatron}.linear_qkv.bias", biases, Qkv(groups), slot))
    if qk_norm:
        rows += [norm(f"{megatron}.{x}_layernorm", f"{hf}.{x}_norm", head_dim) for x in ("q", "k")]
    output = Columns(heads, "num_attention_heads")
    rows.append(one(f"{megatron}.linear_proj.weight", f"{hf}.o_proj.weight", (hidden, heads * head_dim), output))
    return rows


def gated_mlp(megatron: str, hf: str, hidden: int, ffn: int, of: str, expert: int | None = None) -> list[Param]:
    """Gate and up fused into fc1, and down. `of` is the config key that gives the width, for error messages."""
    gate_up = tuple(HFTensor(f"{hf}.{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
    down = (HFTensor(f"{hf}.down_proj.weight", (hidden, ffn)),)
    both, back = GateUp(ffn, of), Columns(ffn, of)
    if expert is None:
        slots = [Slot(f"{hf}.gate_up_proj.weight", both, "mlp"), Slot(f"{hf}.down_proj.weight", back, "mlp")]
    else:
        stack = hf.rpartition(".")[0]  # without the expert's number
        slots = [Slot(f"{stack}.w13_weight", both, "expert"), Slot(f"{stack}.w2_weight", back, "expert")]
    return [
        Param(f"{megatron}.linear_fc1.weight", gate_up, both, slots[0], expert),
        Param(f"{megatron}.linear_fc2.weight", down, back, slots[1], expert),
    ]


def experts(layer: int, hidden: int, ffn: int, count: int, wanted: Iterable[int]) -> list[Param]:
    """The router's weight and the `wanted` ones of the routed experts of a layer, of which there are `count`."""
    megatron, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    rows = [one(f"{megatron}.router.weight", f"{hf}.gate.weight", (count, hidden), Replicated())]
    for e in wanted:
        rows += gated_mlp(f"{megatron}.experts.{e}", f"{hf}.experts.{e}", hidden, ffn, "moe_intermediate_size", e)
    return rows
