"""Modelled seconds against counts by hand, and that they move as they must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import from_dict
from megarl.models.cost import met_weights
from megarl.models.registry import family_of, load_hf_config
from megarl.models.step_time import Machine, StepTime, recomputed_share

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
DENSE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MOE = DENSE | {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 48, "norm_topk_prob": True}
TOKENS = 1000
MACHINE = Machine(flops=1e6, network=1e4, inside=1e5)


def seconds(hf: dict[str, Any], megatron: dict[str, Any] | None = None, budget: int = 100, **sizes: int) -> Any:
    tree = {"model": {"megatron": megatron or {}}, "parallel": sizes, "train": {"token_budget": budget}}
    found = StepTime(hf, TOKENS, 0, MACHINE).seconds(from_dict(tree))
    return {what: pytest.approx(value) for what, value in found.items() if value}


def test_one_rank_only_computes() -> None:
    # Two operations a weight in the forward pass and four in the backward.
    assert seconds(DENSE) == {"arithmetic": 6 * met_weights(DENSE) * TOKENS / 1e6}
    full = seconds(DENSE, {"recompute_granularity": "full"})
    assert full == {"arithmetic": full["arithmetic"].expected, "recomputation": full["arithmetic"].expected / 3}


def test_replicas_share_the_tokens_and_add_their_gradients() -> None:
    weights = 2 * 128 * 64 + 4 * (64 * (64 + 64) + 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    # Three quarters of gradients in fp32 out, of weights in bf16 in; over the network where the ranks are on two nodes.
    for node, rate in ((8, 1e5), (2, 1e4)):
        found = seconds(DENSE, world_size=4, ranks_per_node=node)
        assert found["data"] == weights * 6 * 3 / 4 / rate
        assert found["arithmetic"] == 6 * met_weights(DENSE) * TOKENS / 4 / 1e6


def test_tensor_parallel_traffic() -> None:
    # Of 250 tokens on each pair of ranks, four layers gather and scatter twice, forward and backward, and gather twice
    # more for weight gradients: half of [250, 64] in bf16 each time.
    found = seconds(DENSE, world_size=8, tp=2)
    assert found["tensor"] == 4 * 2 * 5 * 250 * 64 * 2 / 2 / 1e5
    assert seconds(DENSE, {"recompute_granularity": "full"}, world_size=8, tp=2)["tensor"] == (
        found["tensor"].expected * 7 / 5
    )


def test_expert_parallel_traffic() -> None:
    # Two experts a token, there and back, forward and backward, in four layers; three quarters of it to other ranks, of
    # these half on the other node.
    found = seconds(MOE, world_size=4, ep=4, ranks_per_node=2)
    assert found["expert"] == 4 * 4 * 250 * 2 * 64 * 2 * 3 / 4 * 0.5 / 1e4


def test_waiting_in_the_pipeline() -> None:
    found = seconds(DENSE, world_size=2, pp=2)  # ten micro-batches
    stage = found["arithmetic"].expected + found["pipeline"].expected
    assert found["pipeline"] == 2 * TOKENS * 64 * 2 / 1e5
    assert found["waits"] == stage / 10
    parts = seconds(DENSE, world_size=2, pp=2, vpp=2)
    assert parts["pipeline"] == 2 * found["pipeline"].expected
    assert parts["waits"] == (stage + found["pipeline"].expected) / 20
    assert seconds(DENSE, budget=300, world_size=2, pp=2)["waits"] == stage / 4


def test_context_parallel_traffic() -> None:
    # Keys and values of the other rank's 500 tokens, four layers: forward, and twice in the backward pass.
    assert seconds(DENSE, world_size=2, cp=2)["context"] == 4 * 3 * 500 * 2 * 2 * 16 * 2 / 1e5


def test_what_is_computed_twice() -> None:
    settings = family_of(DENSE).megatron_config(DENSE) | {"recompute_granularity": "selective"}
    mlp, attention = 3 * 64 * 96, 64 * 16 * 2 * (4 + 2)
    assert recomputed_share(settings) == 0  # core_attn: no matrix product of weights
    assert recomputed_share(settings | {"recompute_modules": ["mlp"]}) == pytest.approx(mlp / (mlp + attention))
    hf = load_hf_config(MODELS / "deepseek_v3.json")
    latent = family_of(hf).megatron_config(hf) | {"recompute_granularity": "selective"}
    assert recomputed_share(latent | {"recompute_modules": ["moe_act"]}) == 0
    # q up 1536 x 24576 and kv up 512 x 32768, of 187 M in attention and 396 M in MLPs (nine experts of 44 M).
    share = recomputed_share(latent | {"recompute_modules": ["mla_up_proj"]})
    assert share == pytest.approx(54.5e6 / (187.1e6 + 396.4e6), rel=0.01)
