"""Bytes that a rank needs, by part, worked out from a family's table: no process, no device.

Weights, gradients, optimizer states and the engine's weights are exact, element by element, but for the padding of
Megatron's gradient buffers. Activations, what the loss takes for logits, and the KV cache are estimates, as their
functions say. What CUDA, NCCL and the allocator take for themselves is not counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

from megarl.config import Config, ParallelConfig, critic_config
from megarl.models.activations import activation_elements, logits_bytes, micro_batches_in_flight
from megarl.models.blocks import embedding, final
from megarl.models.family import HFConfig
from megarl.models.fp8 import BLOCK, is_fp8, is_quantised
from megarl.models.layout import Param, Qkv, Replicated, local_shape
from megarl.models.registry import family_of
from megarl.models.stages import stage_layers

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StageMemory:
    """One rank of a pipeline stage of the actor. Every rank of it needs the same. All numbers are bytes.

    While training the engine sleeps and has given its memory back; in a push both sides are there, and what is staged;
    while generating, the states of actor and critic stay on the device or, with `train.offload`, leave it.
    """

    stage: int
    layers: tuple[int, ...]  # the actor's decoder layers of the stage
    states: dict[str, int]  # of actor and critic
    training: dict[str, int]  # besides, while training
    generation: dict[str, int]  # while generating, and in a push
    push: dict[str, int]  # besides, in a push
    host: dict[str, int]  # in the host's memory
    offloaded: bool

    @property
    def training_total(self) -> int:
        return sum(self.states.values()) + sum(self.training.values())

    @property
    def generation_total(self) -> int:
        return sum(self.generation.values()) + (0 if self.offloaded else sum(self.states.values()))

    @property
    def push_total(self) -> int:
        return sum(self.states.values()) + sum(self.generation.values()) + sum(self.push.values())

    @property
    def peak(self) -> int:
        return max(self.training_total, self.generation_total, self.push_total)


class Elements(NamedTuple):
    """What a rank holds, in elements: trained dense parameters, vocabulary padding included; trained parameters of
    routed experts; and what is not trained and kept in fp32, the biases of routers."""

    dense: int
    expert: int
    untrained: int = 0


def plan_memory(hf: HFConfig, config: Config, critic_hf: HFConfig | None = None) -> list[StageMemory]:
    """Memory of a rank of each pipeline stage of the actor. `critic_hf`: of the critic's model; None where there is no
    critic. Of a critic in a layout of its own the fullest of the stages counts that the ranks have.

    Raises ConfigError where the layout does not divide the model.
    """
    parallel, rollout, rl = config.parallel, config.rollout, config.algorithm != "sft"
    size = BYTES[config.model.dtype]
    parts = {"actor": _states_and_activations(hf, config, "actor")}
    if critic_hf is not None:
        parts["critic"] = _states_and_activations(critic_hf, critic_config(config), "critic")
    generation: dict[str, int] = {}
    if rl:
        # The engine may only use so much of its own accord; what is asked for is what all its conversations need.
        cached = int(rollout.sglang.get("max_total_tokens") or rollout.concurrency * rollout.max_context)
        generation["engine weights"] = engine_bytes(hf, rollout.tp, size)
        generation["engine KV cache"] = cached * kv_elements(family_of(hf).megatron_config(hf), rollout.tp) * size
    stages = []
    layers = _layers({**family_of(hf).megatron_config(hf), **config.model.megatron}, parallel)
    for stage in range(parallel.pp):
        states: dict[str, int] = {}
        training = {"activations": 0, "logits": 0}
        for mine in parts.values():
            # Stages are runs of ranks: those of the other model that have some of this one's.
            first, last = stage * len(mine) // parallel.pp, -(-(stage + 1) * len(mine) // parallel.pp)
            held, kept = max(mine[first:last], key=lambda one: sum(one[0].values()))
            states |= held
            # One model computes at a time: the greater of the two counts.
            training["activations"] = max(training["activations"], kept)
        if stage == parallel.pp - 1:
            words, hidden = int(hf["vocab_size"]), int(hf["hidden_size"])
            at_once = config.train.logits_at_once
            training["logits"] = logits_bytes(words, hidden, parallel.tp, _tokens(config), at_once, size)
        push, host = {}, {}
        if rl:
            weights, engine = states["actor weights"], generation["engine weights"]
            push["reshard staging"] = staging_bytes(rollout.push_bucket_mb << 20, weights, engine)
            if config.kl.place != "none":
                host["reference weights"] = weights
            if config.train.offload:
                host["states, while generating"] = sum(states[name] for name in states if "gradients" not in name)
        offloaded = rl and config.train.offload
        stages.append(StageMemory(stage, layers[stage], states, training, generation, push, host, offloaded))
    return stages


def _states_and_activations(hf: HFConfig, config: Config, role: str) -> list[tuple[dict[str, int], int]]:
    """By pipeline stage of a model in its own layout: bytes of its states by part, and of what it keeps for the
    backward pass."""
    parallel, size = config.parallel, BYTES[config.model.dtype]
    settings = {**family_of(hf).megatron_config(hf), **config.model.megatron}
    layers = _layers(settings, parallel)
    dp = parallel.world_size // (parallel.tp * parallel.pp)  # and cp: both share the optimizer's states
    expert_dp = max(1, parallel.world_size // (parallel.pp * parallel.ep * parallel.etp))
    found = []
    for stage, elements in enumerate(stage_elements(hf, parallel, layers, role == "critic")):
        states = state_bytes(elements, dp, expert_dp, size)
        mine, count = layers[stage], len(layers[stage]) // parallel.vpp
        runs = [mine[i * count : (i + 1) * count] for i in range(parallel.vpp)]
        in_flight = micro_batches_in_flight(parallel.pp, stage, parallel.vpp)
        kept = activation_elements(settings, runs, parallel.tp, _tokens(config), in_flight, parallel.etp)
        found.append(({f"{role} {part}": amount for part, amount in states.items()}, kept * size))
    return found


def _tokens(config: Config) -> int:
    """The most tokens that a rank has of a micro-batch: the budget, or its part of a longer sequence."""
    longest = config.rollout.max_context if config.algorithm != "sft" else 0
    return max(config.train.token_budget, -(-longest // config.parallel.cp))


def _layers(settings: Mapping[str, Any], parallel: ParallelConfig) -> list[tuple[int, ...]]:
    return stage_layers(int(settings["num_layers"]), parallel.pp, settings, parallel.vpp)


def kinds(hf: HFConfig) -> list[tuple[Param, int]]:
    """The family's table with one of the routed experts of each layer, and how many there are of each parameter.

    Two orders of magnitude shorter than the whole table of a model of many experts.
    """
    return _kinds(json.dumps(dict(hf), sort_keys=True))


@cache
def _kinds(text: str) -> list[tuple[Param, int]]:
    """Of a config.json as text, which can be remembered: a search asks for the same table many times."""
    hf = json.loads(text)
    family = family_of(hf)
    family.check(hf)
    count = family.num_experts(hf)
    rows = embedding(hf) + final(hf)
    for layer in range(int(hf["num_hidden_layers"])):
        rows += family.layer(hf, layer, range(min(1, count)))
    return [(row, 1 if row.expert is None else count) for row in rows]


def stage_elements(
    hf: HFConfig, parallel: ParallelConfig, stages: Sequence[Sequence[int]], critic: bool = False
) -> list[Elements]:
    """What one rank of each stage holds. `stages`: the decoder layers of each, see `stage_layers`. A critic has a head
    of one value in place of the output layer. Raises ConfigError where tp or etp does not divide."""
    layers, others = _table(json.dumps(dict(hf), sort_keys=True), parallel.tp, parallel.etp)
    first, last = [0] * len(stages), [0] * len(stages)
    first[0] = others["embedding.word_embeddings.weight"]
    last[-1] = others["decoder.final_layernorm.weight"]
    if critic:
        last[-1] += int(hf["hidden_size"])
    elif "output_layer.weight" in others:
        last[-1] += others["output_layer.weight"]
    elif len(stages) > 1:
        last[-1] += others["embedding.word_embeddings.weight"]  # the copy of a tied embedding
    found = []
    for stage, mine in enumerate(stages):
        dense, expert, untrained = (sum(layers[layer][i] for layer in mine) for i in range(3))
        found.append(Elements(dense + first[stage] + last[stage], expert // parallel.ep, untrained))
    return found


@cache
def _table(text: str, tp: int, etp: int) -> tuple[list[Elements], dict[str, int]]:
    """What a rank has of each layer, of experts if it had all, and the sizes of what is in no layer."""
    layers = [[0, 0, 0] for _ in range(int(json.loads(text)["num_hidden_layers"]))]
    others: dict[str, int] = {}
    for param, count in _kinds(text):
        size = prod(local_shape(param, tp if param.expert is None else etp, 0))
        if param.megatron.startswith("decoder.layers."):
            kind = 2 if param.buffer else 0 if param.expert is None else 1
            layers[int(param.megatron.split(".")[2])][kind] += size * count
        else:
            others[param.megatron] = size
    return [Elements(*layer) for layer in layers], others


def state_bytes(elements: Elements, dp: int, expert_dp: int, size: int) -> dict[str, int]:
    """Weights, fp32 gradients, and the distributed optimizer's share of master weights and two moments.

    Per element, with d ranks to share the optimizer: 6 + 12 / d bytes in bf16 and 8 + 8 / d in fp32, where the weights
    are their own masters: the table in Megatron-Core's guide to its distributed optimizer. Dense parameters are shared
    over data and context parallel ranks, experts over the ranks that hold the same experts.
    """
    dense, expert, untrained = elements
    states = 12 if size == 2 else 8
    return {
        "weights": (dense + expert) * size + untrained * 4,
        "gradients": (dense + expert) * 4,
        "optimizer": -(-dense * states // dp) + -(-expert * states // expert_dp),
    }


def engine_bytes(hf: HFConfig, tp: int, size: int) -> int:
    """What one rank of an SGLang engine holds in weights, of `size` bytes an element; what an FP8 checkpoint has in FP8
    takes a byte and a scale for each block.

    Of experts it has 1 / tp, whether they are dealt out whole or cut. Keys and values are held more than once where
    there are fewer heads than ranks; latents, norms and routers by all.
    """
    total, fp8 = 0.0, is_fp8(hf)
    for param, count in kinds(hf):
        if isinstance(param.cut, Replicated) and param.expert is None:
            elements = param.size
        elif isinstance(param.cut, Qkv):
            q, k, v = (prod(tensor.shape) for tensor in param.hf)
            elements = q // tp + (k + v) // min(tp, param.cut.groups)
        else:
            elements = -(-param.size * count // tp)
        total += elements * (1 + 4 / BLOCK**2 if fp8 and is_quantised(param) else size)
    return round(total)


def kv_elements(settings: Mapping[str, Any], tp: int) -> int:
    """Elements of KV cache per token on one rank of an engine: keys and values of its heads, or the whole latent."""
    layers = int(settings["num_layers"])
    if settings.get("multi_latent_attention"):
        return layers * (int(settings["kv_lora_rank"]) + int(settings["qk_pos_emb_head_dim"]))
    heads = max(1, int(settings["num_query_groups"]) // tp)
    size = int(settings["kv_channels"] or settings["hidden_size"] // settings["num_attention_heads"])
    return 2 * layers * heads * size


def staging_bytes(bucket: int, weights: int, engine: int) -> int:
    """The most that a push stages on a rank: two halves of a bucket to send from, two to receive into, of which none is
    larger than what there is to send or to receive."""
    return 2 * min(bucket // 2, weights) + 2 * min(bucket // 2, engine)
