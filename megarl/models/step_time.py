"""Seconds of a training step in one layout beside those in another, modelled: what `tools/plan_memory.py` suggests by.

A model to rank layouts with, not to promise a speed by: matrices compute at one rate whatever their shape, links run at
theirs, nothing overlaps, experts get equal shares. None of it has been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from megarl.config import Config
from megarl.models.activations import is_moe
from megarl.models.cost import met_weights, quadratic_cost
from megarl.models.family import HFConfig
from megarl.models.memory import BYTES, stage_elements
from megarl.models.registry import family_of
from megarl.models.stages import stage_layers


@dataclass(frozen=True)
class Machine:
    """Assumed of each GPU: operations per second of matrix products (40 % of what an H100 can do in bf16), and bytes
    per second and direction of the network (400 Gbit/s) and of the links inside a node (NVLink of an H100 or H200)."""

    flops: float = 400e12
    network: float = 50e9
    inside: float = 450e9

    def seconds(self, nbytes: float, far: float) -> float:
        """Of bytes of which the share `far` goes over the network, side by side with the others."""
        return max(nbytes * far / self.network, nbytes * (1 - far) / self.inside)


class StepTime:
    """Of one optimizer step of a model on `tokens` tokens, in sequences of `length`."""

    def __init__(self, hf: HFConfig, tokens: int, length: int, machine: Machine) -> None:
        self.hf, self.tokens, self.machine = hf, tokens, machine
        self.base = family_of(hf).megatron_config(hf)
        self.operations = 2 * met_weights(hf) * (1 + quadratic_cost(hf) * length)  # of a token's forward pass

    def seconds(self, config: Config) -> dict[str, float]:
        """Of the busiest rank, by what it does: `arithmetic`, `recomputation`, communication of `tensor`, `context`,
        `expert`, `pipeline` and `data` parallelism, and what it `waits` in the pipeline."""
        parallel, machine = config.parallel, self.machine
        settings: Mapping[str, Any] = {**self.base, **config.model.megatron}
        tp, cp, pp, ep, etp = parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.etp
        node, size = parallel.ranks_per_node, BYTES[config.model.dtype]
        replica = self.tokens * tp * cp * pp / parallel.world_size  # tokens of a data parallel replica
        mine, hidden = replica / cp, int(settings["hidden_size"])  # tokens that a tensor parallel group has
        stages = stage_layers(int(settings["num_layers"]), pp, settings, parallel.vpp)
        layers = max(len(stage) for stage in stages)
        routed = max(sum(is_moe(settings, layer) for layer in stage) for stage in stages)

        anew = recomputed_share(settings)
        passes = 2 + anew  # forward, backward, and forward again: of what goes over the links
        found = {"arithmetic": 3 * self.operations * mine * layers / int(settings["num_layers"]) / tp / machine.flops}
        found["recomputation"] = found["arithmetic"] / 3 * anew
        # Around attention and around a dense MLP: gathered and scattered, and gathered once more for weight gradients.
        around = (2 * passes + 1) * (2 * layers - routed) * (tp - 1) / tp
        found["tensor"] = machine.seconds(around * mine * hidden * size, far=0 if tp <= node else 1)
        kv = 2 * int(settings.get("num_query_groups") or settings["num_attention_heads"]) * _head(settings)
        ring = (passes + 1) * layers * (cp - 1) / tp
        found["context"] = machine.seconds(ring * mine * kv * size, far=0 if tp * cp <= node else 1)
        chosen = int(settings.get("moe_router_topk") or 0) * mine / tp  # tokens that a rank sends to experts
        span = ep * etp
        leave = 2 * passes * routed * (ep - 1) / ep  # there and back
        found["expert"] = machine.seconds(leave * chosen * hidden * size, far=max(0.0, 1 - node / span))
        found["expert"] += machine.seconds((2 * passes + 1) * routed * (etp - 1) * chosen * hidden * size, far=0)

        # Sent on and sent back, by every part of the stage; ranks of the next stage are a stage's ranks apart.
        far = 0 if parallel.world_size // pp < node else 1
        passed = 2 * parallel.vpp * mine / tp * hidden * size if pp > 1 else 0
        found["pipeline"] = machine.seconds(passed, far)

        micro_batches = ceil(replica / (cp * config.train.token_budget))
        if parallel.vpp > 1:
            micro_batches = ceil(micro_batches / pp) * pp
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
        return self.machine.seconds(elements * (4 + size) * (ranks - 1) / ranks, far=0 if ranks * apart <= node else 1)


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
