"""Seconds of a training step in one layout beside those in another, modelled: what `tools/plan_memory.py` suggests by.

Matrices compute at one rate, experts' at a lower one; what is no matrix product runs at the speed of memory; a layer
costs the host something for each micro-batch; links run at theirs, part of it behind arithmetic; experts get equal
shares. The constants are those with which nine published runs come out (`models/README.md` has them beside the model);
none of it has been measured on a GPU here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from megarl.config import Config
from megarl.models.activation_memory import is_moe
from megarl.models.family import HFConfig
from megarl.models.flops import active_expert_params, active_params, quadratic_cost
from megarl.models.memory import DTYPE_BYTES, stage_elements
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of


@dataclass(frozen=True)
class GPUSpec:
    """Of each GPU; an H100's or H200's. Chosen together so that published runs come out, each within what the part can
    do: nominal are 989e12 operations per second in bf16, 3.35e12 bytes per second of memory, and per direction 50e9 of
    the network (400 Gbit/s) and 450e9 of NVLink.

    flops: operations per second of large matrix products in bf16; fp8: how many times that in FP8; experts: the share
    of it that the products of experts, grouped and narrow, come to. memory: bytes per second. network, inside: bytes
    per second and direction. hidden: the share of traffic that goes on behind arithmetic. layer, moe_layer: seconds
    that launching a layer's kernels, forward and backward, adds to each micro-batch.
    """

    flops: float = 600e12
    fp8_speedup: float = 1.6
    expert_efficiency: float = 0.75
    memory_bandwidth: float = 2.5e12
    network_bandwidth: float = 40e9
    nvlink_bandwidth: float = 270e9
    comm_overlap: float = 0.5
    layer_overhead: float = 0.5e-3
    moe_layer_overhead: float = 2.5e-3

    def transfer_seconds(self, nbytes: float, far: float) -> float:
        """Of bytes of which the share `far` goes over the network, side by side with the others."""
        return self.exposed_seconds(nbytes * far, nbytes * (1 - far))

    def exposed_seconds(self, far: float, near: float) -> float:
        """Seconds, those that are not hidden, of bytes over the network side by side with bytes inside of a node."""
        return (1 - self.comm_overlap) * max(far / self.network_bandwidth, near / self.nvlink_bandwidth)


class StepTime:
    """Of one optimizer step of a model on `tokens` tokens, in sequences of `length`."""

    def __init__(self, hf: HFConfig, tokens: int, length: int, machine: GPUSpec) -> None:
        self.hf, self.tokens, self.machine = hf, tokens, machine
        self.base = family_of(hf).megatron_config(hf)
        self.forward_flops = 2 * active_params(hf) * (1 + quadratic_cost(hf) * length)  # of a token's forward pass
        self.expert_flops = 2 * active_expert_params(hf)  # of these

    def seconds(self, config: Config) -> dict[str, float]:
        """Of the busiest rank, by what it does: `arithmetic` (matrix products), their `recomputation`, `memory` (what
        is no such product), `launches`, communication of `tensor`, `context`, `expert`, `pipeline` and `data`
        parallelism, and what it `waits` in the pipeline."""
        parallel, machine = config.parallel, self.machine
        settings: Mapping[str, Any] = {**self.base, **config.model.megatron}
        tp, cp, pp, ep, etp = parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.etp
        node, size = parallel.ranks_per_node, DTYPE_BYTES[config.model.dtype]
        replica = self.tokens * tp * cp * pp / parallel.world_size  # tokens of a data parallel replica
        mine, hidden = replica / cp, int(settings["hidden_size"])  # tokens that a tensor parallel group has
        stages = stage_layers(int(settings["num_layers"]), pp, settings, parallel.vpp)
        layers = max(len(stage) for stage in stages)
        routed = max(sum(is_moe(settings, layer) for layer in stage) for stage in stages)

        anew = recomputed_share(settings)
        passes = 2 + anew  # forward, backward, and forward again: of what goes over the links
        share = layers / int(settings["num_layers"])
        rate = machine.flops * (machine.fp8_speedup if settings.get("fp8") else 1)
        work = self.forward_flops + self.expert_flops * (1 / machine.expert_efficiency - 1)
        found = {"arithmetic": 3 * work * mine * share / tp / rate}
        found["recomputation"] = found["arithmetic"] / 3 * anew
        widths = (layers - routed) * elementwise_elements(settings, False)
        widths += routed * elementwise_elements(settings, True) if routed else 0
        found["memory"] = elementwise_passes(anew) * widths * size * mine / tp / machine.memory_bandwidth
        micro_batches = ceil(replica / (cp * config.train.token_budget))
        if parallel.vpp > 1:
            micro_batches = ceil(micro_batches / pp) * pp
        found["launches"] = micro_batches * (
            (layers - routed) * machine.layer_overhead + routed * machine.moe_layer_overhead
        )
        # Around attention and around a dense MLP: gathered and scattered, and gathered once more for weight gradients.
        around = (2 * passes + 1) * (2 * layers - routed) * (tp - 1) / tp
        found["tensor"] = machine.transfer_seconds(around * mine * hidden * size, far=0 if tp <= node else 1)
        kv = 2 * int(settings.get("num_query_groups") or settings["num_attention_heads"]) * _head(settings)
        ring = (passes + 1) * layers * (cp - 1) / tp
        found["context"] = machine.transfer_seconds(ring * mine * kv * size, far=0 if tp * cp <= node else 1)
        chosen = int(settings.get("moe_router_topk") or 0) * mine / tp  # tokens that a rank sends to experts
        span = ep * etp
        there_and_back = 2 * passes * routed * mine / tp * hidden * size
        found["expert"] = machine.exposed_seconds(
            *(there_and_back * copies for copies in dispatch_copies(settings, span, ep, node))
        )
        found["expert"] += machine.transfer_seconds(
            (2 * passes + 1) * routed * (etp - 1) * chosen * hidden * size, far=0
        )

        # Sent on and sent back, by every part of the stage; ranks of the next stage are a stage's ranks apart.
        far = 0 if parallel.world_size // pp < node else 1
        passed = 2 * parallel.vpp * mine / tp * hidden * size if pp > 1 else 0
        found["pipeline"] = machine.transfer_seconds(passed, far)

        found["waits"] = sum(found.values()) * (pp - 1) / (micro_batches * parallel.vpp)

        elements = stage_elements(self.hf, parallel, stages)
        found["data"] = max(
            self._sync(stage.dense, parallel.world_size // (tp * pp), tp, node, size)
            + self._sync(stage.expert, parallel.world_size // (span * pp), span, node, size)
            for stage in elements
        )
        return found

    def _sync(self, elements: int, ranks: int, apart: int, node: int, size: int) -> float:
        """Gradients in fp32 scattered over so many ranks, each so far apart, and weights gathered from them."""
        return self.machine.transfer_seconds(
            elements * (4 + size) * (ranks - 1) / ranks, far=0 if ranks * apart <= node else 1
        )


def elementwise_passes(anew: float) -> float:
    """How often what is no matrix product is done: forward, as much twice over backward, and again."""
    return 3 + anew


def elementwise_elements(settings: Mapping[str, Any], moe: bool) -> float:
    """Elements that a layer's forward pass reads and writes for a token besides its matrix products: norms, residual,
    rotation, attention's operands, the MLP's activation; with experts each chosen one's copy of the token, out and back
    into the token's place."""
    hidden = int(settings["hidden_size"])
    if not moe:
        return 20 * hidden + 3 * int(settings["ffn_hidden_size"])
    shared = int(settings.get("moe_shared_expert_intermediate_size") or 0)
    each = 6 * hidden + 3 * int(settings["moe_ffn_hidden_size"])
    return 20 * hidden + 3 * shared + int(settings["moe_router_topk"]) * each


def dispatch_copies(settings: Mapping[str, Any], span: int, ep: int, node: int) -> tuple[float, float]:
    """How many copies of a token go to experts on other nodes, and how many inside of its node, each way. With DeepEP
    (the dispatcher `flex`) a node gets a token once, however many of its experts are chosen."""
    chosen, nodes = int(settings.get("moe_router_topk") or 0), max(1.0, span / node)
    leave = chosen * (ep - 1) / ep
    far = leave * (1 - 1 / nodes)
    if settings.get("moe_token_dispatcher_type") == "flex":
        limit = nodes * min(
            1.0, (settings.get("moe_router_group_topk") or 1) / (settings.get("moe_router_num_groups") or 1)
        )
        far = min(far, limit * (1 - (1 - 1 / limit) ** chosen) * (1 - 1 / nodes))
    return far, leave / nodes


def recomputed_share(settings: Mapping[str, Any]) -> float:
    """How much of the forward pass's matrix products is done twice."""
    granularity = settings.get("recompute_granularity")
    if granularity != "selective":
        return 1.0 if granularity == "full" else 0.0
    modules = settings.get("recompute_modules") or ()
    hidden = int(settings["hidden_size"])
    again, whole = 0.0, 0.0
    for layer in range(int(settings["num_layers"])):
        parts = {"attention": float(_attention(settings))}
        if is_moe(settings, layer):
            chosen = 3 * hidden * int(settings["moe_ffn_hidden_size"]) * int(settings["moe_router_topk"])
            shared = 3 * hidden * int(settings.get("moe_shared_expert_intermediate_size") or 0)
            parts |= {"moe": chosen, "shared_experts": shared}
        else:
            parts["mlp"] = 3 * hidden * int(settings["ffn_hidden_size"])
        whole += sum(parts.values())
        names = {*modules} | ({"shared_experts"} if "moe" in modules else set())
        again += sum(amount for name, amount in parts.items() if name in names)
        again += _latent_up(settings) if "mla_up_proj" in modules else 0
    return again / whole


def _attention(settings: Mapping[str, Any]) -> int:
    """Weights of a layer's attention."""
    hidden, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    if not settings.get("multi_latent_attention"):
        return hidden * _head(settings) * 2 * (heads + int(settings["num_query_groups"]))
    down = int(settings.get("q_lora_rank") or 0) + int(settings["kv_lora_rank"]) + int(settings["qk_pos_emb_head_dim"])
    return hidden * down + _latent_up(settings) + hidden * heads * int(settings["v_head_dim"])


def _latent_up(settings: Mapping[str, Any]) -> int:
    """Of that, what projects latents up to queries, keys and values."""
    heads, nope = int(settings["num_attention_heads"]), int(settings["qk_head_dim"])
    query = (nope + int(settings["qk_pos_emb_head_dim"])) * int(settings.get("q_lora_rank") or settings["hidden_size"])
    return heads * (query + (nope + int(settings["v_head_dim"])) * int(settings["kv_lora_rank"]))


def _head(settings: Mapping[str, Any]) -> int:
    if settings.get("multi_latent_attention"):
        return int(settings["v_head_dim"])
    return int(settings["kv_channels"] or settings["hidden_size"] // settings["num_attention_heads"])
