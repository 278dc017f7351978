"""How long a sequence takes to compute, beside others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.family import HFConfig
from megarl.models.registry import family_of, param_count


def met_weights(hf: HFConfig) -> float:
    """How many weights a token meets: all but the embedding's, and of the experts those chosen; norms and biases among
    them, which `flops.py` leaves out: this is for comparing sequences."""
    settings, counts = family_of(hf).megatron_config(hf), param_count(hf)
    met = float(sum(counts.values()) - counts["embedding"] - counts["experts"])
    if experts := settings.get("num_moe_experts"):
        met += counts["experts"] * settings["moe_router_topk"] / experts
    return met if counts["head"] else met + counts["embedding"]  # a tied head


def met_experts(hf: HFConfig) -> float:
    """How many of these are routed experts'."""
    settings = family_of(hf).megatron_config(hf)
    experts = settings.get("num_moe_experts")
    return param_count(hf)["experts"] * settings["moe_router_topk"] / experts if experts else 0.0


def quadratic_cost(hf: HFConfig) -> float:
    """q, where a sequence of n tokens costs as much as n + q n^2 times what one token costs without attention.

    A token costs 2 operations for each weight that it meets. Causal attention makes n^2 / 2 pairs, of each head and
    layer, which cost 2 operations for each element of a query and of a value. Sliding windows are not looked at: Gemma
    2's spares an eighth of the pairs of its longest sequences.
    """
    settings = family_of(hf).megatron_config(hf)
    pairs = settings["num_layers"] * settings["num_attention_heads"] * attention_width(settings)
    return float(pairs / (2 * met_weights(hf)))


def attention_width(settings: Mapping[str, Any]) -> int:
    """Elements of a query and of a value of one head. settings: of Megatron's TransformerConfig."""
    if settings.get("multi_latent_attention"):
        return int(settings["qk_head_dim"] + settings["qk_pos_emb_head_dim"] + settings["v_head_dim"])
    return 2 * int(settings["kv_channels"])
