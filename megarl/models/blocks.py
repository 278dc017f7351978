"""The rows that the tables of several families share, and the check that a table divides."""

from __future__ import annotations

from megarl.models.family import HFConfig
from megarl.models.layout import Columns, Cut, GateUp, HFTensor, Param, Qkv, Replicated, Vocab, pieces
from megarl.models.options import need


def checked(params: list[Param], tp: int) -> list[Param]:
    """The same table; raises ConfigError for the first tensor that `tp` does not divide."""
    for param in params:
        pieces(param, tp, 0)
    return params


def one(megatron: str, hf: str, shape: tuple[int, ...], cut: Cut) -> Param:
    """A parameter made of one HF tensor."""
    return Param(megatron, (HFTensor(hf, shape),), cut)


def embedding(hf: HFConfig) -> list[Param]:
    shape = (need(hf, "vocab_size"), need(hf, "hidden_size"))
    return [one("embedding.word_embeddings.weight", "model.embed_tokens.weight", shape, Vocab())]


def final(hf: HFConfig) -> list[Param]:
    """Final norm, and the output layer unless it is the embedding's weight again."""
    vocab, hidden = need(hf, "vocab_size"), need(hf, "hidden_size")
    rows = [one("decoder.final_layernorm.weight", "model.norm.weight", (hidden,), Replicated())]
    if not hf.get("tie_word_embeddings", False):
        rows.append(one("output_layer.weight", "lm_head.weight", (vocab, hidden), Vocab()))
    return rows


def norm(megatron: str, hf: str, size: int) -> Param:
    return one(f"{megatron}.weight", f"{hf}.weight", (size,), Replicated())


def grouped_attention(
    layer: int, hidden: int, heads: int, groups: int, head_dim: int, bias: bool = False, qk_norm: bool = False
) -> list[Param]:
    """Grouped-query attention: fused qkv, output projection, optionally biases of qkv and norms of q and k."""
    megatron, hf = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    sizes = {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}
    weights = tuple(HFTensor(f"{hf}.{x}_proj.weight", (rows, hidden)) for x, rows in sizes.items())
    rows = [Param(f"{megatron}.linear_qkv.weight", weights, Qkv(groups))]
    if bias:
        biases = tuple(HFTensor(f"{hf}.{x}_proj.bias", (rows,)) for x, rows in sizes.items())
        rows.append(Param(f"{megatron}.linear_qkv.bias", biases, Qkv(groups)))
    if qk_norm:
        rows += [norm(f"{megatron}.{x}_layernorm", f"{hf}.{x}_norm", head_dim) for x in ("q", "k")]
    output = Columns(heads, "num_attention_heads")
    rows.append(one(f"{megatron}.linear_proj.weight", f"{hf}.o_proj.weight", (hidden, heads * head_dim), output))
    return rows


def gated_mlp(megatron: str, hf: str, hidden: int, ffn: int, of: str, expert: bool = False) -> list[Param]:
    """Gate and up fused into fc1, and down. `of` is the config key that gives the width, for error messages."""
    gate_up = tuple(HFTensor(f"{hf}.{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
    down = (HFTensor(f"{hf}.down_proj.weight", (hidden, ffn)),)
    return [
        Param(f"{megatron}.linear_fc1.weight", gate_up, GateUp(ffn, of), expert),
        Param(f"{megatron}.linear_fc2.weight", down, Columns(ffn, of), expert),
    ]


def experts(layer: int, hidden: int, ffn: int, count: int) -> list[Param]:
    """The router's weight and every routed expert of a layer."""
    megatron, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    rows = [one(f"{megatron}.router.weight", f"{hf}.gate.weight", (count, hidden), Replicated())]
    for e in range(count):
        rows += gated_mlp(f"{megatron}.experts.{e}", f"{hf}.experts.{e}", hidden, ffn, "moe_intermediate_size", True)
    return rows
