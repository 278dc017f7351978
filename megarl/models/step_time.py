"""Model the seconds of a training step by layout, to rank the layouts of `parallel.auto` and `megarl plan`.

The constants are fitted to nine published runs (`models/README.md` compares them with the model); nothing has been
measured on a GPU here. Experts get equal loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from megarl.config import Config, OptimizerConfig
from megarl.models.activation_memory import DTYPE_BYTES, is_moe
from megarl.models.family import HFConfig
from megarl.models.flops import active_expert_params, active_params, quadratic_cost
from megarl.models.layout_algebra import Param
from megarl.models.memory import stage_elements, unique_params
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of, part_of


@dataclass(frozen=True)
class GPUSpec:
    """Effective rates of a GPU, by default an H100 or H200.

    The defaults are jointly fitted to published runs, each below its nominal limit.
    """

    flops: float = 600e12  # per second, of large matrix products in bf16; nominally 989e12
    fp8_speedup: float = 1.6  # factor on `flops`
    expert_efficiency: float = 0.75  # factor on `flops` for the grouped, narrow matrix products of experts
    memory_bandwidth: float = 2.5e12  # bytes per second; nominally 3.35e12
    network_bandwidth: float = 40e9  # bytes per second and direction; nominally 50e9, 400 Gbit/s
    nvlink_bandwidth: float = 270e9  # likewise; nominally 450e9
    comm_overlap: float = 0.5  # fraction of traffic that overlaps with arithmetic
    layer_overhead: float = 0.5e-3  # seconds per micro-batch to launch a layer's kernels, forward and backward
    moe_layer_overhead: float = 2.5e-3
    pcie_bandwidth: float = 50e9  # bytes per second and direction to the host; nominally 64e9; assumed, not fitted
    host_bandwidth: float = 40e9  # of host memory per GPU; nominally 77e9 with 16 channels of DDR5-4800 for 8; assumed

    def transfer_seconds(self, nbytes: float, crosses_nodes: bool) -> float:
        """Return the exposed seconds of a transfer over the network, or else within a node."""
        return self.exposed_seconds(nbytes, 0.0) if crosses_nodes else self.exposed_seconds(0.0, nbytes)

    def exposed_seconds(self, network_bytes: float, node_bytes: float) -> float:
        """Return the exposed seconds of `network_bytes` over the network and concurrent `node_bytes` in a node."""
        return (1 - self.comm_overlap) * max(network_bytes / self.network_bandwidth, node_bytes / self.nvlink_bandwidth)


class StepTime:
    """Models one optimizer step on `tokens` tokens, in sequences of `length` tokens."""

    def __init__(self, hf: HFConfig, tokens: int, length: int, machine: GPUSpec) -> None:
        self.hf, self.tokens, self.length, self.machine = hf, tokens, length, machine
        self.base = family_of(hf).megatron_config(hf)
        self.forward_flops = 2 * active_params(hf) * (1 + quadratic_cost(hf) * length)  # per token, forward pass
        self.expert_flops = 2 * active_expert_params(hf)  # of these, in experts

    def seconds(self, config: Config, optimizer: OptimizerConfig | None = None) -> dict[str, float]:
        """Return the seconds of the busiest rank by activity.

        `arithmetic` (matrix products), their `recomputation`, `memory` (all other operations), `launches`,
        communication of `tensor`, `context`, `expert`, `pipeline` and `data` parallelism, pipeline `waits`, and the
        update of offloaded states on the `host`: the slowest of gradients down, weights up, and AdamW itself.
        """
        parallel, machine = config.parallel, self.machine
        settings: Mapping[str, Any] = {**self.base, **config.model.megatron}
        tp, cp, pp, ep, etp = parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.etp
        node, size = parallel.ranks_per_node, DTYPE_BYTES[config.model.dtype]
        # Tokens of a data parallel replica, of the busiest where there are fewer sequences than replicas.
        replica = max(self.tokens * tp * cp * pp / parallel.world_size, min(self.length, self.tokens))
        group_tokens, hidden = replica / cp, int(settings["hidden_size"])  # tokens of a tensor parallel group
        stages = stage_layers(int(settings["num_layers"]), pp, settings, parallel.vpp)
        layers = max(len(stage) for stage in stages)
        moe_layers = max(sum(is_moe(settings, layer) for layer in stage) for stage in stages)

        recomputed = recomputed_share(self.hf, settings)
        passes = 2 + recomputed  # of communication: forward, backward, recomputed forward
        stage_fraction = layers / int(settings["num_layers"])
        rate = machine.flops * (machine.fp8_speedup if settings.get("fp8") else 1)
        work = self.forward_flops + self.expert_flops * (1 / machine.expert_efficiency - 1)
        seconds = {"arithmetic": 3 * work * group_tokens * stage_fraction / tp / rate}
        seconds["recomputation"] = seconds["arithmetic"] / 3 * recomputed
        widths = (layers - moe_layers) * elementwise_elements(settings, False)
        widths += moe_layers * elementwise_elements(settings, True) if moe_layers else 0
        # Element-wise operations have one forward pass and two for backward, plus recomputation.
        seconds["memory"] = (3 + recomputed) * widths * size * group_tokens / tp / machine.memory_bandwidth
        micro_batches = ceil(replica / (cp * config.train.max_tokens_per_gpu))
        if parallel.vpp > 1:
            micro_batches = ceil(micro_batches / pp) * pp
        seconds["launches"] = micro_batches * (
            (layers - moe_layers) * machine.layer_overhead + moe_layers * machine.moe_layer_overhead
        )
        # Attention and dense MLPs gather and scatter, and gather once more for weight gradients.
        gathers = (2 * passes + 1) * (2 * layers - moe_layers) * (tp - 1) / tp
        seconds["tensor"] = machine.transfer_seconds(gathers * group_tokens * hidden * size, tp > node)
        ring = (passes + 1) * layers * (cp - 1) / tp
        seconds["context"] = machine.transfer_seconds(
            ring * group_tokens * kv_elements(settings) * size, tp * cp > node
        )
        chosen = int(settings.get("moe_router_topk") or 0) * group_tokens / tp  # tokens that a rank sends to experts
        span = ep * etp
        dispatched = 2 * passes * moe_layers * group_tokens / tp * hidden * size
        far, near = dispatch_copies(settings, span, ep, node)
        seconds["expert"] = machine.exposed_seconds(dispatched * far, dispatched * near)
        gathered = (2 * passes + 1) * moe_layers * (etp - 1) * chosen * hidden * size
        seconds["expert"] += machine.transfer_seconds(gathered, crosses_nodes=False)

        # Every part of the stage sends forward and back. The next stage's ranks are one stage's ranks apart.
        sent = 2 * parallel.vpp * group_tokens / tp * hidden * size if pp > 1 else 0
        seconds["pipeline"] = machine.transfer_seconds(sent, parallel.world_size // pp >= node)
        seconds["waits"] = sum(seconds.values()) * (pp - 1) / (micro_batches * parallel.vpp)

        def sync(elements: int, stride: int) -> float:
            """Return the seconds to reduce-scatter fp32 gradients and all-gather weights over ranks `stride` apart."""
            ranks = parallel.world_size // (stride * pp)
            return machine.transfer_seconds(elements * (4 + size) * (ranks - 1) / ranks, ranks * stride > node)

        elements = stage_elements(self.hf, parallel, stages)
        seconds["data"] = max(sync(stage.dense, tp) + sync(stage.expert, span) for stage in elements)
        fraction = (optimizer or config.actor_optimizer).offload_fraction
        ranks = parallel.world_size // pp
        offloaded = fraction * max(stage.dense * tp / ranks + stage.expert * span / ranks for stage in elements)
        # AdamW reads gradient, master and two moments, and writes all but the gradient. Weights are cast on the host.
        host_bytes = 28 + (4 + size if size < 4 else 0)
        seconds["host"] = offloaded * max(4 / machine.pcie_bandwidth, host_bytes / machine.host_bandwidth)
        return seconds


def context_costs(hf: HFConfig, sizes: Sequence[int], tp: int, ranks_per_node: int) -> tuple[tuple[int, float], ...]:
    """Return each context parallel size, with the exposed seconds of communication over those of arithmetic.

    Both are those of a training step without recomputation; arithmetic is without the quadratic part of attention.
    """
    machine, settings = GPUSpec(), family_of(hf).megatron_config(hf)
    arithmetic = 6 * active_params(hf) / machine.flops
    sent = 3 * int(settings["num_layers"]) * kv_elements(settings) * DTYPE_BYTES["bfloat16"]  # by each further rank
    seconds = (machine.transfer_seconds((size - 1) * sent, tp * size > ranks_per_node) for size in sizes)
    return tuple((size, exposed / arithmetic) for size, exposed in zip(sizes, seconds, strict=True))


def kv_elements(settings: Mapping[str, Any]) -> int:
    """Return the elements of a token's keys and values in a layer, over all tensor parallel ranks."""
    head_dim = settings["v_head_dim" if settings.get("multi_latent_attention") else "kv_channels"]
    return 2 * int(settings.get("num_query_groups") or settings["num_attention_heads"]) * int(head_dim)


def elementwise_elements(settings: Mapping[str, Any], moe: bool) -> float:
    """Return the elements per token that a layer's forward pass reads and writes outside of matrix products."""
    hidden = int(settings["hidden_size"])
    if not moe:
        return 20 * hidden + 3 * int(settings["ffn_hidden_size"])
    shared = int(settings.get("moe_shared_expert_intermediate_size") or 0)
    per_expert = 6 * hidden + 3 * int(settings["moe_ffn_hidden_size"])  # with copies of the token, out and back
    return 20 * hidden + 3 * shared + int(settings["moe_router_topk"]) * per_expert


def dispatch_copies(settings: Mapping[str, Any], span: int, ep: int, node: int) -> tuple[float, float]:
    """Return the copies of a token sent each way to experts on other nodes, and to experts within its node.

    With DeepEP (dispatcher `flex`) a node receives a token once, however many of its experts are chosen.
    """
    chosen, nodes = int(settings.get("moe_router_topk") or 0), max(1.0, span / node)
    leaving = chosen * (ep - 1) / ep
    far = leaving * (1 - 1 / nodes)
    if settings.get("moe_token_dispatcher_type") == "flex":
        groups, group_topk = settings.get("moe_router_num_groups") or 1, settings.get("moe_router_group_topk") or 1
        limit = nodes * min(1.0, group_topk / groups)
        far = min(far, limit * (1 - (1 - 1 / limit) ** chosen) * (1 - 1 / nodes))
    return far, leaving / nodes


def recomputed_share(hf: HFConfig, settings: Mapping[str, Any]) -> float:
    """Return the fraction of the forward pass's matrix products that is recomputed."""
    granularity = settings.get("recompute_granularity")
    if granularity != "selective":
        return 1.0 if granularity == "full" else 0.0
    modules = set(settings.get("recompute_modules") or ())
    recomputed, total = 0.0, 0.0
    for param, _ in unique_params(hf):
        names, size = _recompute_modules(param), float(param.size)
        if "moe" in names and param.expert is not None:
            size *= int(settings["moe_router_topk"])
        total += size if names else 0
        recomputed += size if names & modules else 0
    return recomputed / total


def _recompute_modules(param: Param) -> set[str]:
    """Return those of Megatron's `recompute_modules` that contain a matrix; none for other parameters."""
    part = part_of(param)
    if part == "attention" and len(param.hf[0].shape) == 2:
        is_up = any(name in param.megatron for name in ("linear_q_up_proj", "linear_q_proj", "linear_kv_up_proj"))
        return {"attention", "mla_up_proj"} if is_up else {"attention"}
    if ".shared_experts." in param.megatron:
        return {"shared_experts", "moe"}
    return {"experts": {"moe"}, "dense mlp": {"mlp"}}.get(part, set())
