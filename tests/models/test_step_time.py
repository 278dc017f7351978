"""Modelled step times by hand, and compared with published runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from small_configs import QWEN2

from megarl.config import from_dict
from megarl.models.flops import active_params
from megarl.models.registry import family_of, load_hf_config
from megarl.models.step_time import GPUSpec, StepTime, dispatch_copies, recomputed_share

sys.path.append(str(Path(__file__).parent))

from published import PUBLISHED_RUNS, PublishedRun  # noqa: E402

pytestmark = pytest.mark.alone

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
DENSE: dict[str, Any] = QWEN2 | {"vocab_size": 128}
MOE = DENSE | {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 48, "norm_topk_prob": True}
TOKENS = 1000
MACHINE = GPUSpec(
    1e6,
    2.0,
    1.0,
    inf,
    network_bandwidth=1e4,
    nvlink_bandwidth=1e5,
    comm_overlap=0.0,
    layer_overhead=0.0,
    moe_layer_overhead=0.0,
)


def seconds(
    hf: dict[str, Any],
    megatron: dict[str, Any] | None = None,
    budget: int = 100,
    machine: GPUSpec = MACHINE,
    **sizes: int,
) -> Any:
    tree = {"model": {"megatron": megatron or {}}, "parallel": sizes, "train": {"max_tokens_per_gpu": budget}}
    result = StepTime(hf, TOKENS, 0, machine).seconds(from_dict(tree))
    return {cost: pytest.approx(value) for cost, value in result.items() if value}


def test_single_rank_only_computes() -> None:
    # Two operations a weight in the forward pass and four in the backward.
    assert seconds(DENSE) == {"arithmetic": 6 * active_params(DENSE) * TOKENS / 1e6}
    full = seconds(DENSE, {"recompute_granularity": "full"})
    assert full == {"arithmetic": full["arithmetic"].expected, "recomputation": full["arithmetic"].expected / 3}


def test_data_parallel_compute_and_traffic() -> None:
    weights = 2 * 128 * 64 + 4 * (64 * (64 + 64) + 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    # Three quarters of gradients in fp32 out, of weights in bf16 in; over the network where the ranks are on two nodes.
    for node, rate in ((8, 1e5), (2, 1e4)):
        result = seconds(DENSE, world_size=4, ranks_per_node=node)
        assert result["data"] == weights * 6 * 3 / 4 / rate
        assert result["arithmetic"] == 6 * active_params(DENSE) * TOKENS / 4 / 1e6


def test_offloaded_update_takes_the_slower_of_transfer_and_host() -> None:
    weights = 2 * 128 * 64 + 4 * (64 * (64 + 64) + 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64

    def host_seconds(machine: GPUSpec) -> float:
        tree = {"parallel": {"world_size": 4, "tp": 1}, "actor_optimizer": {"offload_fraction": 0.5}}
        return StepTime(DENSE, TOKENS, 0, machine).seconds(from_dict(tree))["host"]

    # A quarter of the elements is a rank's shard, and half of that on the host. Gradients are 4 bytes; AdamW reads 16
    # and writes 12, and casting to bf16 reads 4 and writes 2.
    assert host_seconds(replace(MACHINE, pcie_bandwidth=1e3, host_bandwidth=inf)) == pytest.approx(
        weights / 8 * 4 / 1e3
    )
    slow_host = replace(MACHINE, pcie_bandwidth=1e3, host_bandwidth=2e3)
    assert host_seconds(slow_host) == pytest.approx(weights / 8 * 34 / 2e3)
    assert "host" not in seconds(DENSE, machine=slow_host, world_size=4)


def test_tensor_parallel_traffic() -> None:
    # Of 250 tokens on each pair of ranks, four layers gather and scatter twice, forward and backward, and gather twice
    # more for weight gradients: half of [250, 64] in bf16 each time.
    result = seconds(DENSE, world_size=8, tp=2)
    assert result["tensor"] == 4 * 2 * 5 * 250 * 64 * 2 / 2 / 1e5
    assert seconds(DENSE, {"recompute_granularity": "full"}, world_size=8, tp=2)["tensor"] == (
        result["tensor"].expected * 7 / 5
    )


def test_expert_parallel_traffic() -> None:
    # Two experts a token, there and back, forward and backward, in four layers; three quarters of it to other ranks, of
    # these half on the other node.
    result = seconds(MOE, world_size=4, ep=4, ranks_per_node=2)
    assert result["expert"] == 4 * 4 * 250 * 2 * 64 * 2 * 3 / 4 * 0.5 / 1e4


def test_pipeline_bubble_and_traffic() -> None:
    result = seconds(DENSE, world_size=2, pp=2)  # ten micro-batches
    stage = result["arithmetic"].expected + result["pipeline"].expected
    assert result["pipeline"] == 2 * TOKENS * 64 * 2 / 1e5
    assert result["waits"] == stage / 10
    parts = seconds(DENSE, world_size=2, pp=2, vpp=2)
    assert parts["pipeline"] == 2 * result["pipeline"].expected
    assert parts["waits"] == (stage + result["pipeline"].expected) / 20
    assert seconds(DENSE, budget=300, world_size=2, pp=2)["waits"] == stage / 4


def test_context_parallel_traffic() -> None:
    # Keys and values of the other rank's 500 tokens, four layers: forward, and twice in the backward pass.
    assert seconds(DENSE, world_size=2, cp=2)["context"] == 4 * 3 * 500 * 2 * 2 * 16 * 2 / 1e5


def test_recomputed_share() -> None:
    settings = family_of(DENSE).megatron_config(DENSE) | {"recompute_granularity": "selective"}
    mlp, attention = 3 * 64 * 96, 64 * 16 * 2 * (4 + 2)
    assert recomputed_share(DENSE, settings) == 0  # core_attn: no matrix product of weights
    assert recomputed_share(DENSE, settings | {"recompute_modules": ["mlp"]}) == pytest.approx(mlp / (mlp + attention))
    hf = load_hf_config(MODELS / "deepseek_v3.json")
    latent = family_of(hf).megatron_config(hf) | {"recompute_granularity": "selective"}
    assert recomputed_share(hf, latent | {"recompute_modules": ["moe_act"]}) == 0
    # q up 1536 x 24576 and kv up 512 x 32768, of 187 M in attention and 396 M in MLPs (nine experts of 44 M).
    recomputed = recomputed_share(hf, latent | {"recompute_modules": ["mla_up_proj"]})
    assert recomputed == pytest.approx(54.5e6 / (187.1e6 + 396.4e6), rel=0.01)


def test_expert_efficiency_and_fp8() -> None:
    complete = seconds(MOE)["arithmetic"].expected
    assert seconds(MOE, {"fp8": "e4m3"})["arithmetic"] == complete / 2
    half_efficiency = seconds(MOE, machine=replace(MACHINE, expert_efficiency=0.5))["arithmetic"].expected
    routed = 4 * 2 * 3 * 64 * 48  # two experts a token in four layers
    assert half_efficiency - complete == pytest.approx(6 * routed * TOKENS / 1e6)


def test_memory_bound_operations() -> None:
    # 20 times the hidden size and three times the MLP's, in bf16, forward and twice as much backward.
    dense = (20 * 64 + 3 * 96) * 4 * 2 * 3 * TOKENS / 1e4
    assert seconds(DENSE, machine=replace(MACHINE, memory_bandwidth=1e4))["memory"] == dense
    moe = (20 * 64 + 2 * (6 * 64 + 3 * 48)) * 4 * 2 * 3 * TOKENS / 1e4
    assert seconds(MOE, machine=replace(MACHINE, memory_bandwidth=1e4))["memory"] == moe


def test_launch_overhead_per_micro_batch() -> None:
    slow = replace(MACHINE, layer_overhead=0.5, moe_layer_overhead=2.0)
    assert seconds(DENSE, machine=slow)["launches"] == 10 * 4 * 0.5
    assert seconds(MOE, machine=slow, budget=500)["launches"] == 2 * 4 * 2.0
    assert seconds(MOE, machine=slow, world_size=2, pp=2)["launches"] == 10 * 2 * 2.0


def test_communication_overlap() -> None:
    exposed = seconds(MOE, world_size=4, ep=4, ranks_per_node=2)["expert"].expected
    hidden = seconds(MOE, machine=replace(MACHINE, comm_overlap=0.25), world_size=4, ep=4, ranks_per_node=2)["expert"]
    assert hidden == 0.75 * exposed


def test_flex_dispatcher_sends_a_token_to_a_node_once() -> None:
    settings = {"moe_router_topk": 8}
    assert dispatch_copies(settings, 32, 32, 8) == pytest.approx((8 * 31 / 32 * 3 / 4, 8 * 31 / 32 / 4))
    flex = settings | {"moe_token_dispatcher_type": "flex"}
    # Of four nodes, eight choices meet 3.6, of which a quarter is the token's own.
    assert dispatch_copies(flex, 32, 32, 8)[0] == pytest.approx(4 * (1 - 0.75**8) * 3 / 4)
    # DeepSeek-V3 chooses in half of the groups: in four of eight nodes.
    grouped = flex | {"moe_router_num_groups": 8, "moe_router_group_topk": 4}
    assert dispatch_copies(grouped, 64, 64, 8)[0] == pytest.approx(4 * (1 - 0.75**8) * 7 / 8)


@pytest.mark.parametrize("run", PUBLISHED_RUNS, ids=[run.name for run in PUBLISHED_RUNS])
def test_predicts_published_speeds(run: PublishedRun) -> None:
    """Predictions are within a factor of 1.5, and the README's table has them."""
    assert 1 / 1.5 <= run.predicted_speed / run.speed <= 1.5
    assert run.readme_row in (MODELS.parents[1] / "megarl/models/README.md").read_text()
