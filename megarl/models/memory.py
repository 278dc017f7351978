"""Compute the memory that a rank needs, by part, from a family's table, without processes or devices.

Weights, gradients, optimizer states and the engine's weights are exact, element by element, except for the padding of
Megatron's gradient buffers. Activations, logits and the KV cache are estimates, as their functions state. The memory
overhead of CUDA, NCCL and the allocator is not counted.
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
    """Memory, in bytes, of each rank of a pipeline stage of a model, the actor unless another is named.

    During training the engine sleeps and holds no memory. During weight sync it holds its weights and staging buffers,
    and during generation its weights and KV cache. In these two phases the states of actor and critic stay on the
    device or, with `train.offload`, are offloaded, except for the weights being synced.
    """

    stage: int
    layers: tuple[int, ...]  # decoder layers of the stage; empty without a model
    states: dict[str, int]  # of actor and critic
    training: dict[str, int]  # in addition, during training
    generation: dict[str, int]  # in addition, during generation
    weight_sync: dict[str, int]  # in addition, during weight sync
    host: dict[str, int]  # in host memory
    is_offloaded: bool

    @property
    def training_total(self) -> int:
        return sum(self.states.values()) + sum(self.training.values())

    @property
    def generation_total(self) -> int:
        # A reward model is onloaded for scoring while the engine is awake.
        states = self.states.get(REWARD_WEIGHTS, 0) if self.is_offloaded else sum(self.states.values())
        return states + sum(self.generation.values())

    @property
    def weight_sync_total(self) -> int:
        states = self.states.get("actor weights", 0) if self.is_offloaded else sum(self.states.values())
        return states + sum(self.weight_sync.values())

    @property
    def peak(self) -> int:
        return max(self.training_total, self.generation_total, self.weight_sync_total)


class InferenceStage(NamedTuple):
    """Memory, in bytes, of a rank of a pipeline stage of an inference-only model."""

    layers: tuple[int, ...]
    weights: int
    activations: int  # of one layer at a time
    logits: int = 0


class ElementCounts(NamedTuple):
    """Numbers of elements on a rank.

    dense: trained dense parameters, vocabulary padding included.
    expert: trained parameters of routed experts.
    frozen: parameters that LoRA freezes.
    biases: the routers' expert biases, not trained and kept in fp32.
    """

    dense: int = 0
    expert: int = 0
    frozen: int = 0
    biases: int = 0


def plan_memory(
    hf: HFConfig,
    config: Config,
    requirements: Requirements,
    critic_hf: HFConfig | None = None,
    inference_models: Mapping[str, Sequence[InferenceStage]] | None = None,
    main_role: str = "",
) -> list[StageMemory]:
    """Plan the memory of a rank of each pipeline stage of the actor, or of the reward model when that is trained.

    Roles that `placement` puts on other ranks are left out. Raises ConfigError if the layout does not divide the model.

    critic_hf: config of the critic's model; None without a critic. If the critic has its own layout, the fullest of its
        stages on these ranks counts.
    inference_models: inference-only models by role, as from `inference_stages` or as a single stage. The fullest stage
        counts.
    main_role: the role whose ranks and stages to plan for instead; `rollout` for ranks with engines only, which have no
        stages.
    """
    lead = main_role or requirements.main_role
    placement = placement_of(config)
    ranks, served_models = set(placement.ranks_of(lead)), inference_models or {}
    local_roles = {
        role for role in ("actor", "critic", *served_models, "rollout") if ranks & set(placement.ranks_of(role))
    } | {lead}
    if lead == "rollout":
        local_roles = {lead}
    hf_by_role = {"actor": hf, "reward_model": hf, "critic": critic_hf}
    rollout, size = config.rollout, DTYPE_BYTES[config.model.dtype]
    tokens = _tokens(config, requirements)
    trained = {
        role: _states_and_activations(model, role_config(config, role), role.replace("_", " "), tokens)
        for role in (() if lead in served_models else (lead, "critic"))
        if role in local_roles and (model := hf_by_role.get(role)) is not None
    }
    engine: dict[str, int] = {}
    if requirements.has_engines(config) and "rollout" in local_roles:
        # `max_total_tokens` caps the cache; otherwise it must hold all of the engine's conversations.
        cached = int(rollout.sglang.get("max_total_tokens") or rollout.concurrency * rollout.max_context)
        drafts = bool(rollout.num_speculative_tokens)
        engine["engine weights"] = engine_bytes(hf, rollout.tp, size, drafts)
        engine["engine KV cache"] = cached * kv_elements(hf, rollout.tp, drafts) * size
    stages: list[StageMemory] = []
    layers: list[tuple[int, ...]] = [()]
    tp = 1
    if lead in served_models:
        layers = [stage.layers for stage in served_models[lead]]
    elif (model := hf_by_role.get(lead)) is not None:
        parallel = role_config(config, lead).parallel
        layers, tp = _layers(_settings(model, config), parallel), parallel.tp
    for stage, stage_layer_ids in enumerate(layers):
        states: dict[str, int] = {}
        computes = trained or local_roles & served_models.keys() - {"reward"}
        training = {"activations": 0, "logits": 0, "micro-batches": 0} if computes else {}
        for model_stages in trained.values():
            model_states, activations, micro_batches = max(
                _overlapping_stages(model_stages, stage, len(layers)), key=lambda one: sum(one[0].values())
            )
            states |= model_states
            # One model computes at a time, so the larger of the two counts.
            training["activations"] = max(training["activations"], activations)
            training["micro-batches"] = max(training["micro-batches"], micro_batches)
        if stage == len(layers) - 1 and lead == "actor":
            vocab_size, hidden = int(hf["vocab_size"]), int(hf["hidden_size"])
            at_once = config.train.logits_chunk_size
            training["logits"] = logits_bytes(vocab_size, hidden, tp, tokens, at_once, size)
        generation, weight_sync, host = dict(engine), {}, checkpoint_copy(config, states, trained)
        for role in (role for role in served_models if role in local_roles):
            fullest = max(_overlapping_stages(served_models[role], stage, len(layers)), key=lambda one: one.weights)
            if role == "reward":  # it scores while the engine is awake
                states[REWARD_WEIGHTS] = fullest.weights
                generation["reward model activations"] = fullest.activations
                continue
            states[f"{role} weights"] = fullest.weights
            training["activations"] = max(training["activations"], fullest.activations)
            training["logits"] = max(training["logits"], fullest.logits)
        if requirements.has_rollout and requirements.trained_roles:
            weights, engine_weights = states.get("actor weights", 0), engine.get("engine weights", 0)
            if staged := sync_staging_bytes(rollout.weight_sync_bucket_mb << 20, weights, engine_weights):
                weight_sync.update({"engine weights": engine_weights, "reshard staging": staged})
            if weights and "reference" in requirements.roles and not config.lora.rank:
                host["reference weights"] = weights
            if weights and config.guards.ppo_kl:
                host["last good policy"] = weights + states["actor optimizer"]
            if config.train.offload and states:
                host["states, while generating"] = sum(states[name] for name in states if "gradients" not in name)
        offloaded = requirements.has_rollout and config.train.offload
        stages.append(StageMemory(stage, stage_layer_ids, states, training, generation, weight_sync, host, offloaded))
    return stages


def _overlapping_stages(stages: Sequence[Stage], stage: int, count: int) -> Sequence[Stage]:
    """Return another model's stages on the ranks of stage `stage` of `count`. Stages are runs of consecutive ranks."""
    return stages[stage * len(stages) // count : -(-(stage + 1) * len(stages) // count)]


def _states_and_activations(
    hf: HFConfig, config: Config, role: str, tokens: int
) -> list[tuple[dict[str, int], int, int]]:
    """Return, by pipeline stage of a model, the bytes of its states by part, of activations and of micro-batches.

    tokens: of a micro-batch on a rank.
    """
    parallel, size = config.parallel, DTYPE_BYTES[config.model.dtype]
    settings = _settings(hf, config)
    layers = _layers(settings, parallel)
    dp = parallel.world_size // (parallel.tp * parallel.pp)  # including cp: optimizer states are sharded over both
    expert_dp = max(1, parallel.world_size // (parallel.pp * parallel.ep * parallel.etp))
    results = []
    mtp = num_trained_mtp(hf, config) if role == "actor" else 0
    for stage, elements in enumerate(stage_elements(hf, parallel, layers, role != "actor", config.lora, bool(mtp))):
        states = state_bytes(elements, dp, expert_dp, size)
        stage_layer_ids, count = layers[stage], len(layers[stage]) // parallel.vpp
        runs = [stage_layer_ids[i * count : (i + 1) * count] for i in range(parallel.vpp)]
        stage_mtp = mtp if stage == parallel.pp - 1 else 0  # each costs about as much as the last layer
        in_flight = micro_batches_in_flight(parallel.pp, stage, parallel.vpp)
        if settings.get("fp8"):  # MTP layers are not recomputed in FP8
            activations = stage_mtp * layer_elements(settings, layers[-1][-1], parallel.etp) * tokens // parallel.tp
        else:
            activations, runs[-1] = 0, runs[-1] + layers[-1][-1:] * stage_mtp
        activations += activation_elements(settings, runs, parallel.tp, tokens, in_flight, parallel.etp)
        is_first_and_last = stage == 0, stage == parallel.pp - 1
        replays = role == "actor" and config.train.routing_replay
        micro_batch = micro_batch_bytes(
            settings, stage_layer_ids, tokens, parallel.tp, parallel.cp, *is_first_and_last, mtp, replays
        )
        states = {f"{role} {part}": amount for part, amount in states.items()}
        results.append((states, activations * size, ceil(micro_batch * in_flight)))
    return results


def inference_stages(
    hf: HFConfig, config: Config, requirements: Requirements, head: bool, dtype: str = "float32"
) -> list[InferenceStage]:
    """Return the memory of an inference-only model by pipeline stage. head: whether it has a value head."""
    parallel, tokens, size = config.parallel, _tokens(config, requirements), DTYPE_BYTES[dtype]
    settings = _settings(hf, config)
    layers = _layers(settings, parallel)
    stages = []
    for stage_layer_ids, elements in zip(layers, stage_elements(hf, parallel, layers, head), strict=True):
        widest = max((layer_elements(settings, layer, parallel.etp) for layer in stage_layer_ids), default=0)
        weights = size * (sum(elements) - elements.biases) + 4 * elements.biases
        stages.append(InferenceStage(stage_layer_ids, weights, size * widest * tokens // parallel.tp))
    if not head:
        vocab_size, hidden, at_once = int(hf["vocab_size"]), int(hf["hidden_size"]), config.train.logits_chunk_size
        stages[-1] = stages[-1]._replace(logits=logits_bytes(vocab_size, hidden, parallel.tp, tokens, at_once, size))
    return stages


def classifier_stages(hf: HFConfig, elements: int, dtype: str, config: Config) -> list[InferenceStage]:
    """Return the memory of any classifier, replicated on each of its ranks.

    Activations assume a typical layer: six times the hidden size plus three times the MLP's size per token.
    """
    layers, size = tuple(range(int(hf.get("num_hidden_layers") or 1))), DTYPE_BYTES[dtype]
    width = 6 * int(hf.get("hidden_size") or 0) + 3 * int(hf.get("intermediate_size") or 0)
    return [InferenceStage(layers, size * elements, size * width * config.train.max_tokens_per_gpu)]


def _tokens(config: Config, requirements: Requirements) -> int:
    """Return the largest number of tokens of a micro-batch on a rank: the budget, or its part of a longer sequence."""
    longest = config.rollout.max_context if requirements.has_rollout else 0
    return max(config.train.max_tokens_per_gpu, -(-longest // config.parallel.cp))


def _settings(hf: HFConfig, config: Config) -> dict[str, Any]:
    """Return Megatron's fields and `post_norms`, for which Megatron has no field."""
    family = family_of(hf)
    return {**family.megatron_config(hf), **config.model.megatron, "post_norms": family.extras(hf).post_norms}


def _layers(settings: Mapping[str, Any], parallel: ParallelConfig) -> list[tuple[int, ...]]:
    return stage_layers(int(settings["num_layers"]), parallel.pp, settings, parallel.vpp)


def unique_params(hf: HFConfig, mtp: bool = False) -> list[tuple[Param, int]]:
    """Return the family's table with one routed expert per layer, and the multiplicity of each parameter.

    Two orders of magnitude shorter than the full table of a model with many experts.

    mtp: include the multi-token prediction layers.
    """
    return _unique_params(_text(hf), mtp)


def _text(hf: HFConfig) -> str:
    return json.dumps(dict(hf), sort_keys=True)


@cache
def _unique_params(text: str, mtp: bool) -> list[tuple[Param, int]]:
    """Implement `unique_params`, cached by the config's text: a layout search needs the same table many times."""
    hf = json.loads(text)
    family = family_of(hf)
    family.check(hf)
    count = family.num_experts(hf)
    rows = embedding(hf) + final_params(hf)
    for layer in range(int(hf["num_hidden_layers"]) + (family.num_mtp_layers(hf) if mtp else 0)):
        rows += family.layer(hf, layer, range(min(1, count)))
    return [(row, 1 if row.expert is None else count) for row in rows]


def critic_params(policy: Sequence[Param], hidden: int) -> list[Param]:
    """Return a policy's table with a value head in place of the output layer."""
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
    """Return the element counts on one rank of each pipeline stage.

    Raises ConfigError if tp or etp does not divide the model, or a LoRA target does not exist.

    stages: the decoder layers of each stage, see `stage_layers`.
    head: whether a value head replaces the output layer.
    mtp: include the multi-token prediction layers.
    """
    layers, end_counts, copy = _count_elements(_text(hf), parallel.tp, parallel.etp, parallel.ep, head, lora, mtp)
    counts = [_sum(layers[layer] for layer in stage_layer_ids) for stage_layer_ids in stages]
    counts[0] = _sum([counts[0], end_counts["embedding"]])
    counts[-1] = _sum([counts[-1], end_counts["final"], *([copy] if len(stages) > 1 else [])])
    return counts


def _sum(parts: Iterable[ElementCounts]) -> ElementCounts:
    return ElementCounts(*map(sum, zip(ElementCounts(), *parts, strict=True)))


@cache
def _count_elements(
    text: str, tp: int, etp: int, ep: int, head: bool, lora: LoraConfig, mtp: bool
) -> tuple[list[ElementCounts], dict[str, ElementCounts], ElementCounts]:
    """Return a rank's element counts of each layer, of the embedding and the final layers, and of the embedding's copy.

    The last stage holds that copy if the embedding is tied or used by multi-token prediction.
    """
    hf = json.loads(text)
    params, experts = [param for param, _ in _unique_params(text, mtp)], family_of(hf).num_experts(hf)
    if head:
        params = critic_params(params, int(hf["hidden_size"]))
    is_tied = all(param.megatron != "output_layer.weight" for param in params)
    if lora.rank:
        params = params + adapter_params(params, lora)
    layers = [ElementCounts() for _ in range(int(hf["num_hidden_layers"]))]
    end_counts = {"embedding": ElementCounts(), "final": ElementCounts()}
    for param in params:
        if param.expert is None:
            size = prod(local_shape(param, tp, 0))
        else:
            size = prod(local_shape(param, etp, 0)) * experts // ep
        is_frozen = lora.rank and param.slot is not None  # adapters and a value head have no engine slot
        field = (
            "biases" if param.is_buffer else "frozen" if is_frozen else "dense" if param.expert is None else "expert"
        )
        counts = ElementCounts(**{field: size})
        if param.megatron.startswith("decoder.layers."):
            layer = int(param.megatron.split(".")[2])
            layers[layer] = _sum([layers[layer], counts])
        else:
            part = "embedding" if param.megatron.startswith("embedding.") else "final"
            end_counts[part] = _sum([end_counts[part], counts])
    return layers, end_counts, end_counts["embedding"] if is_tied or mtp else ElementCounts()


def state_bytes(elements: ElementCounts, dp: int, expert_dp: int, size: int) -> dict[str, int]:
    """Return the bytes of weights, fp32 gradients, and the rank's shard of master weights and two moments.

    Per element, with the optimizer sharded over d ranks: 6 + 12 / d bytes in bf16 and 8 + 8 / d in fp32, where the
    weights are their own masters. Source: the table in Megatron-Core's guide to its distributed optimizer. States of
    dense parameters are sharded over data and context parallel ranks, those of experts over the ranks that hold the
    same experts.
    """
    dense, expert, frozen, biases = elements
    states = 12 if size == 2 else 8
    return {
        "weights": (dense + expert + frozen) * size + biases * 4,
        "gradients": (dense + expert) * 4,
        "optimizer": -(-dense * states // dp) + -(-expert * states // expert_dp),
    }


def engine_bytes(hf: HFConfig, tp: int, size: int, drafts: bool = False) -> int:
    """Return the bytes of weights on one rank of an SGLang engine.

    A rank has 1 / tp of the experts, whether these are distributed (EP) or sharded (TP). KV heads are replicated if
    fewer than ranks; latents, norms and routers always are.

    size: bytes per element. FP8 weights of an FP8 checkpoint take one byte, plus a scale per block.
    drafts: include the multi-token prediction layers.
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
    """Return the KV cache elements per token on one engine rank: keys and values of its heads, or the full latent.

    drafts: include the multi-token prediction layers.
    """
    family = family_of(hf)
    settings = family.megatron_config(hf)
    layers = int(settings["num_layers"]) + (family.num_mtp_layers(hf) if drafts else 0)
    if settings.get("multi_latent_attention"):
        return layers * (int(settings["kv_lora_rank"]) + int(settings["qk_pos_emb_head_dim"]))
    heads = max(1, int(settings["num_query_groups"]) // tp)
    size = int(settings["kv_channels"] or settings["hidden_size"] // settings["num_attention_heads"])
    return 2 * layers * heads * size


def sync_staging_bytes(bucket: int, weights: int, engine: int) -> int:
    """Return an upper bound on the staging memory of a weight sync on a rank.

    Two half buckets to send from and two to receive into, none larger than the data to send or receive.
    """
    return 2 * min(bucket // 2, weights) + 2 * min(bucket // 2, engine)
