"""Bytes that a rank needs, by part, worked out from a family's table: no process, no device.

Weights, gradients, optimizer states and the engine's weights are exact, element by element, but for the padding of
Megatron's gradient buffers. Activations, what the loss takes for logits, and the KV cache are estimates, as their
functions say. What CUDA, NCCL and the allocator take for themselves is not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import Any, NamedTuple, TypeVar

from megarl.config import Config, LoraConfig, ParallelConfig
from megarl.models.activation_memory import (
    activation_elements,
    layer_elements,
    logits_bytes,
    micro_batch_bytes,
    micro_batches_in_flight,
)
from megarl.models.blocks import embedding, final_params
from megarl.models.family import HFConfig
from megarl.models.fp8 import BLOCK, is_fp8, is_quantised
from megarl.models.host_memory import checkpoint_copy
from megarl.models.layout_algebra import HFTensor, Param, QKVSharding, Replicated, local_shape
from megarl.models.lora_tables import adapter_params
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of, num_trained_mtp
from megarl.parallel.placement import placement_of, role_config
from megarl.types.requirements import Requirements

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
Stage = TypeVar("Stage")
REWARD_WEIGHTS = "reward model weights"
NO_LORA = LoraConfig()


@dataclass(frozen=True)
class StageMemory:
    """One rank of a pipeline stage of a model, the actor unless another is named. Every rank of it needs the same. All
    numbers are bytes.

    While training the engine sleeps and has given its memory back; in a push its weights are there, and what is staged;
    while generating, its weights and KV cache. In both, the states of actor and critic stay on the device or, with
    `train.offload`, leave it, but for the weights that are pushed.
    """

    stage: int
    layers: tuple[int, ...]  # the model's decoder layers of the stage; none where there is no model
    states: dict[str, int]  # of actor and critic
    training: dict[str, int]  # besides, while training
    generation: dict[str, int]  # besides, while generating
    push: dict[str, int]  # besides, in a push
    host: dict[str, int]  # in the host's memory
    is_offloaded: bool

    @property
    def training_total(self) -> int:
        return sum(self.states.values()) + sum(self.training.values())

    @property
    def generation_total(self) -> int:
        # A reward model comes back to score while the engine is awake.
        states = self.states.get(REWARD_WEIGHTS, 0) if self.is_offloaded else sum(self.states.values())
        return states + sum(self.generation.values())

    @property
    def weight_sync_total(self) -> int:
        states = self.states.get("actor weights", 0) if self.is_offloaded else sum(self.states.values())
        return states + sum(self.push.values())

    @property
    def peak(self) -> int:
        return max(self.training_total, self.generation_total, self.weight_sync_total)


class InferenceStage(NamedTuple):
    """A rank of a pipeline stage of a model that computes and is not trained; bytes."""

    layers: tuple[int, ...]
    weights: int
    activations: int  # of one layer at a time
    logits: int = 0


class ElementCounts(NamedTuple):
    """What a rank holds, in elements: trained dense parameters, vocabulary padding included; trained parameters of
    routed experts; those that LoRA leaves as they are; and biases of routers, not trained and kept in fp32."""

    dense: int = 0
    expert: int = 0
    frozen: int = 0
    biases: int = 0


def plan_memory(
    hf: HFConfig,
    config: Config,
    declared: Requirements,
    critic_hf: HFConfig | None = None,
    served: Mapping[str, Sequence[InferenceStage]] | None = None,
    whose: str = "",
) -> list[StageMemory]:
    """Memory of a rank of each pipeline stage of the actor, or of the reward model in training. `critic_hf`: of the
    critic's model; None where there is no critic. Of a critic in a layout of its own the fullest of the stages counts
    that the ranks have. `served`: likewise, by role, models that are not trained: of `inference_stages`, or whole.
    What `placement` has on other ranks is left out.

    whose: the role whose ranks, and whose model's stages, these are instead; of ranks with engines only, which have no
    stages, `rollout`. Raises ConfigError where the layout does not divide the model.
    """
    lead = whose or declared.main_role
    placement = placement_of(config)
    ranks, given = set(placement.ranks_of(lead)), served or {}
    here = {role for role in ("actor", "critic", *given, "rollout") if ranks & set(placement.ranks_of(role))} | {lead}
    if lead == "rollout":
        here = {lead}
    of = {"actor": hf, "reward_model": hf, "critic": critic_hf}
    rollout, size = config.rollout, DTYPE_BYTES[config.model.dtype]
    tokens = _tokens(config, declared)
    trained = {
        role: _states_and_activations(model, role_config(config, role), role.replace("_", " "), tokens)
        for role in (() if lead in given else (lead, "critic"))
        if role in here and (model := of.get(role)) is not None
    }
    engine: dict[str, int] = {}
    if declared.has_engines(config) and "rollout" in here:
        # The engine may only use so much of its own accord; what is asked for is what all its conversations need.
        cached = int(rollout.sglang.get("max_total_tokens") or rollout.concurrency * rollout.max_context)
        drafts = bool(rollout.draft_tokens)
        engine["engine weights"] = engine_bytes(hf, rollout.tp, size, drafts)
        engine["engine KV cache"] = cached * kv_elements(hf, rollout.tp, drafts) * size
    stages: list[StageMemory] = []
    layers: list[tuple[int, ...]] = [()]
    tp = 1
    if lead in given:
        layers = [stage.layers for stage in given[lead]]
    elif (model := of.get(lead)) is not None:
        parallel = role_config(config, lead).parallel
        layers, tp = _layers(_settings(model, config), parallel), parallel.tp
    for stage, mine in enumerate(layers):
        states: dict[str, int] = {}
        computes = trained or here & given.keys() - {"reward"}
        training = {"activations": 0, "logits": 0, "micro-batches": 0} if computes else {}
        for model_stages in trained.values():
            held, kept, cut = max(
                _overlapping_stages(model_stages, stage, len(layers)), key=lambda one: sum(one[0].values())
            )
            states |= held
            # One model computes at a time: the greater of the two counts.
            training["activations"] = max(training["activations"], kept)
            training["micro-batches"] = max(training["micro-batches"], cut)
        if stage == len(layers) - 1 and lead == "actor":
            words, hidden = int(hf["vocab_size"]), int(hf["hidden_size"])
            at_once = config.train.logits_at_once
            training["logits"] = logits_bytes(words, hidden, tp, tokens, at_once, size)
        generation, push, host = dict(engine), {}, checkpoint_copy(config, states, trained)
        for role in (role for role in given if role in here):
            fullest = max(_overlapping_stages(given[role], stage, len(layers)), key=lambda one: one.weights)
            if role == "reward":  # while the engine is awake
                states[REWARD_WEIGHTS] = fullest.weights
                generation["reward model activations"] = fullest.activations
                continue
            states[f"{role} weights"] = fullest.weights
            training["activations"] = max(training["activations"], fullest.activations)
            training["logits"] = max(training["logits"], fullest.logits)
        if declared.has_rollout and declared.trained_roles:
            weights, taken = states.get("actor weights", 0), engine.get("engine weights", 0)
            if staged := sync_staging_bytes(rollout.push_bucket_mb << 20, weights, taken):
                push.update({"engine weights": taken, "reshard staging": staged})
            if weights and "reference" in declared.roles and not config.lora.rank:
                host["reference weights"] = weights
            if weights and config.guards.ppo_kl:
                host["last good policy"] = weights + states["actor optimizer"]
            if config.train.offload and states:
                host["states, while generating"] = sum(states[name] for name in states if "gradients" not in name)
        offloaded = declared.has_rollout and config.train.offload
        stages.append(StageMemory(stage, mine, states, training, generation, push, host, offloaded))
    return stages


def _overlapping_stages(stages: Sequence[Stage], stage: int, count: int) -> Sequence[Stage]:
    """Those of another model's stages that ranks have of a model's stage, one of `count`: stages are runs of ranks."""
    return stages[stage * len(stages) // count : -(-(stage + 1) * len(stages) // count)]


def _states_and_activations(
    hf: HFConfig, config: Config, role: str, tokens: int
) -> list[tuple[dict[str, int], int, int]]:
    """By pipeline stage of a model in its own layout: bytes of its states by part, of what it keeps for the backward
    pass, and of the micro-batches at work. tokens: of a micro-batch on a rank."""
    parallel, size = config.parallel, DTYPE_BYTES[config.model.dtype]
    settings = _settings(hf, config)
    layers = _layers(settings, parallel)
    dp = parallel.world_size // (parallel.tp * parallel.pp)  # and cp: both share the optimizer's states
    expert_dp = max(1, parallel.world_size // (parallel.pp * parallel.ep * parallel.etp))
    found = []
    mtp = num_trained_mtp(hf, config) if role == "actor" else 0
    for stage, elements in enumerate(stage_elements(hf, parallel, layers, role != "actor", config.lora, bool(mtp))):
        states = state_bytes(elements, dp, expert_dp, size)
        mine, count = layers[stage], len(layers[stage]) // parallel.vpp
        runs = [mine[i * count : (i + 1) * count] for i in range(parallel.vpp)]
        ahead = mtp if stage == parallel.pp - 1 else 0  # each is about one more of the last layer
        in_flight = micro_batches_in_flight(parallel.pp, stage, parallel.vpp)
        if settings.get("fp8"):  # with which it is not recomputed
            kept = ahead * layer_elements(settings, layers[-1][-1], parallel.etp) * tokens // parallel.tp
        else:
            kept, runs[-1] = 0, runs[-1] + layers[-1][-1:] * ahead
        kept += activation_elements(settings, runs, parallel.tp, tokens, in_flight, parallel.etp)
        ends = stage == 0, stage == parallel.pp - 1
        replays = role == "actor" and config.train.replay_routing
        cut = micro_batch_bytes(settings, mine, tokens, parallel.tp, parallel.cp, *ends, mtp, replays)
        states = {f"{role} {part}": amount for part, amount in states.items()}
        found.append((states, kept * size, ceil(cut * in_flight)))
    return found


def inference_stages(
    hf: HFConfig, config: Config, declared: Requirements, head: bool, dtype: str = "float32"
) -> list[InferenceStage]:
    """By pipeline stage of a model that is not trained, in a role's layout. head: it has one of one value."""
    parallel, tokens, size = config.parallel, _tokens(config, declared), DTYPE_BYTES[dtype]
    settings = _settings(hf, config)
    layers = _layers(settings, parallel)
    found = []
    for mine, elements in zip(layers, stage_elements(hf, parallel, layers, head), strict=True):
        widest = max((layer_elements(settings, layer, parallel.etp) for layer in mine), default=0)
        weights = size * (sum(elements) - elements.biases) + 4 * elements.biases
        found.append(InferenceStage(mine, weights, size * widest * tokens // parallel.tp))
    if not head:
        words, hidden, at_once = int(hf["vocab_size"]), int(hf["hidden_size"]), config.train.logits_at_once
        found[-1] = found[-1]._replace(logits=logits_bytes(words, hidden, parallel.tp, tokens, at_once, size))
    return found


def classifier_stages(hf: HFConfig, elements: int, dtype: str, config: Config) -> list[InferenceStage]:
    """Of any classifier, whole on each of its ranks; its activations by what is usual in a layer: six times its width,
    three times that of its MLP."""
    layers, size = tuple(range(int(hf.get("num_hidden_layers") or 1))), DTYPE_BYTES[dtype]
    wide = 6 * int(hf.get("hidden_size") or 0) + 3 * int(hf.get("intermediate_size") or 0)
    return [InferenceStage(layers, size * elements, size * wide * config.train.token_budget)]


def _tokens(config: Config, declared: Requirements) -> int:
    """The most tokens that a rank has of a micro-batch: the budget, or its part of a longer sequence."""
    longest = config.rollout.max_context if declared.has_rollout else 0
    return max(config.train.token_budget, -(-longest // config.parallel.cp))


def _settings(hf: HFConfig, config: Config) -> dict[str, Any]:
    """Megatron's fields, and `post_norms`, for which it has none."""
    family = family_of(hf)
    return {**family.megatron_config(hf), **config.model.megatron, "post_norms": family.extras(hf).post_norms}


def _layers(settings: Mapping[str, Any], parallel: ParallelConfig) -> list[tuple[int, ...]]:
    return stage_layers(int(settings["num_layers"]), parallel.pp, settings, parallel.vpp)


def unique_params(hf: HFConfig, mtp: bool = False) -> list[tuple[Param, int]]:
    """The family's table with one of the routed experts of each layer, and how many there are of each parameter; mtp:
    with the layers of multi-token prediction.

    Two orders of magnitude shorter than the whole table of a model of many experts.
    """
    return _unique_params(_text(hf), mtp)


def _text(hf: HFConfig) -> str:
    return json.dumps(dict(hf), sort_keys=True)


@cache
def _unique_params(text: str, mtp: bool) -> list[tuple[Param, int]]:
    """Of a config.json as text, which can be remembered: a search asks for the same table many times."""
    hf = json.loads(text)
    family = family_of(hf)
    family.check(hf)
    count = family.num_experts(hf)
    rows = embedding(hf) + final_params(hf)
    for layer in range(int(hf["num_hidden_layers"]) + (family.num_mtp_layers(hf) if mtp else 0)):
        rows += family.layer(hf, layer, range(min(1, count)))
    return [(row, 1 if row.expert is None else count) for row in rows]


def critic_params(policy: Sequence[Param], hidden: int) -> list[Param]:
    """A policy's table with a head of one value in place of the output layer."""
    head = Param("output_layer.weight", (HFTensor("score.weight", (1, hidden)),), Replicated())
    return [*(param for param in policy if param.megatron != head.megatron), head]


def stage_elements(
    hf: HFConfig,
    parallel: ParallelConfig,
    stages: Sequence[Sequence[int]],
    head: bool = False,
    lora: LoraConfig = NO_LORA,
    mtp: bool = False,
) -> list[ElementCounts]:
    """What one rank of each stage holds. `stages`: the decoder layers of each, see `stage_layers`. head: there is one
    of one value in place of the output layer. mtp: there are the layers of multi-token prediction. Raises ConfigError
    where tp or etp does not divide, and for LoRA's targets that are not there."""
    layers, others, copy = _count_elements(_text(hf), parallel.tp, parallel.etp, parallel.ep, head, lora, mtp)
    found = [_sum(layers[layer] for layer in mine) for mine in stages]
    found[0] = _sum([found[0], others["embedding"]])
    found[-1] = _sum([found[-1], others["final"], *([copy] if len(stages) > 1 else [])])
    return found


def _sum(parts: Iterable[ElementCounts]) -> ElementCounts:
    return ElementCounts(*map(sum, zip(ElementCounts(), *parts, strict=True)))


@cache
def _count_elements(
    text: str, tp: int, etp: int, ep: int, head: bool, lora: LoraConfig, mtp: bool
) -> tuple[list[ElementCounts], dict[str, ElementCounts], ElementCounts]:
    """What a rank has of each layer, of the embedding and of what follows the layers; and the copy of the embedding
    that a last stage has where it is tied or used there."""
    hf = json.loads(text)
    params, experts = [param for param, _ in _unique_params(text, mtp)], family_of(hf).num_experts(hf)
    if head:
        params = critic_params(params, int(hf["hidden_size"]))
    tied = all(param.megatron != "output_layer.weight" for param in params)
    if lora.rank:
        params = params + adapter_params(params, lora)
    layers = [ElementCounts() for _ in range(int(hf["num_hidden_layers"]))]
    others = {"embedding": ElementCounts(), "final": ElementCounts()}
    for param in params:
        if param.expert is None:
            size = prod(local_shape(param, tp, 0))
        else:
            size = prod(local_shape(param, etp, 0)) * experts // ep
        frozen = lora.rank and param.slot is not None  # adapters and a head of one value are in no engine
        kind = "biases" if param.is_buffer else "frozen" if frozen else "dense" if param.expert is None else "expert"
        mine = ElementCounts(**{kind: size})
        if param.megatron.startswith("decoder.layers."):
            layer = int(param.megatron.split(".")[2])
            layers[layer] = _sum([layers[layer], mine])
        else:
            part = "embedding" if param.megatron.startswith("embedding.") else "final"
            others[part] = _sum([others[part], mine])
    return layers, others, others["embedding"] if tied or mtp else ElementCounts()


def state_bytes(elements: ElementCounts, dp: int, expert_dp: int, size: int) -> dict[str, int]:
    """Weights, fp32 gradients, and the distributed optimizer's share of master weights and two moments.

    Per element, with d ranks to share the optimizer: 6 + 12 / d bytes in bf16 and 8 + 8 / d in fp32, where the weights
    are their own masters: the table in Megatron-Core's guide to its distributed optimizer. Dense parameters are shared
    over data and context parallel ranks, experts over the ranks that hold the same experts.
    """
    dense, expert, frozen, biases = elements
    states = 12 if size == 2 else 8
    return {
        "weights": (dense + expert + frozen) * size + biases * 4,
        "gradients": (dense + expert) * 4,
        "optimizer": -(-dense * states // dp) + -(-expert * states // expert_dp),
    }


def engine_bytes(hf: HFConfig, tp: int, size: int, drafts: bool = False) -> int:
    """What one rank of an SGLang engine holds in weights, of `size` bytes an element; what an FP8 checkpoint has in FP8
    takes a byte and a scale for each block. drafts: with the layers of multi-token prediction.

    Of experts it has 1 / tp, whether they are dealt out whole or cut. Keys and values are held more than once where
    there are fewer heads than ranks; latents, norms and routers by all.
    """
    total, fp8 = 0.0, is_fp8(hf)
    for param, count in unique_params(hf, drafts):
        if isinstance(param.sharding, Replicated) and param.expert is None:
            elements = param.size
        elif isinstance(param.sharding, QKVSharding):
            q, k, v = (prod(tensor.shape) for tensor in param.hf)
            elements = q // tp + (k + v) // min(tp, param.sharding.num_kv_heads)
        else:
            elements = -(-param.size * count // tp)
        total += elements * (1 + 4 / BLOCK**2 if fp8 and is_quantised(param) else size)
    return round(total)


def kv_elements(hf: HFConfig, tp: int, drafts: bool = False) -> int:
    """Elements of KV cache per token on one rank of an engine: keys and values of its heads, or the whole latent; also
    of the layers of multi-token prediction where it `drafts`."""
    family = family_of(hf)
    settings = family.megatron_config(hf)
    layers = int(settings["num_layers"]) + (family.num_mtp_layers(hf) if drafts else 0)
    if settings.get("multi_latent_attention"):
        return layers * (int(settings["kv_lora_rank"]) + int(settings["qk_pos_emb_head_dim"]))
    heads = max(1, int(settings["num_query_groups"]) // tp)
    size = int(settings["kv_channels"] or settings["hidden_size"] // settings["num_attention_heads"])
    return 2 * layers * heads * size


def sync_staging_bytes(bucket: int, weights: int, engine: int) -> int:
    """The most that a push stages on a rank: two halves of a bucket to send from, two to receive into, of which none is
    larger than what there is to send or to receive."""
    return 2 * min(bucket // 2, weights) + 2 * min(bucket // 2, engine)
