"""Compute the memory that a rank needs, by part, from a family's table, without processes or devices.

Weights, gradients, optimizer states and the engine's weights are exact, element by element, except for the padding of
Megatron's gradient buffers. Activations, logits and the KV cache are estimates, as their functions state. The memory
overhead of CUDA, NCCL and the allocator is not counted.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config import Config, LoraConfig, ParallelConfig, RolloutConfig
from megarl.models import int4
from megarl.models.activation_memory import DTYPE_BYTES, layer_elements, logits_bytes, megatron_settings, training_bytes
from megarl.models.deepseek_sparse import indexer_types, is_indexer
from megarl.models.family import HFConfig
from megarl.models.fp8 import BLOCK, is_fp8, is_quantised
from megarl.models.host_memory import (
    MEMORY_CHECKPOINTS,
    OFFLOADED_STATES,
    PENDING_CHECKPOINT,
    checkpoint_copies,
    count_memory_copies,
)
from megarl.models.layout_algebra import (
    BEFORE_DECODER,
    TOWER,
    FusedSharding,
    GatedQKVSharding,
    HFTensor,
    Param,
    QKVSharding,
    Replicated,
    layer_of,
    local_shape,
)
from megarl.models.lora_tables import adapted_weights, adapter_params, factor_params
from megarl.models.megatron_fields import FP8_RECIPE
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of, num_trained_mtp
from megarl.parallel.placement import has_separate_reference, placement_of, role_config, split_role
from megarl.parallel.policy_configs import (
    list_engine_roles,
    policy_config,
    serves_adapters,
    sleeps_with_weights,
    syncs_adapters,
    syncs_changes,
)
from megarl.types.requirements import Requirements

REWARD_WEIGHTS = "reward model weights"
FP8_COPIES = "FP8 copies of weights"
"""With FP8 training, what Transformer Engine's linear layers have from their first pass on, beside their weights."""
STATES_PER_REQUEST = 5
"""States of delta nets that SGLang holds per running request: its own, and those of prefixes in the radix cache."""


@dataclass(frozen=True)
class StageMemory:
    """Memory, in bytes, of each rank of a pipeline stage of a model.

    During training the engine sleeps and holds no memory. During weight sync and generation the states of actor and
    critic stay on the device or, with `train.offload`, are offloaded, except for the weights being synced, and for FP8
    copies of weights.
    """

    stage: int
    layers: tuple[int, ...]  # decoder layers of the stage; empty without a model
    states: dict[str, int]  # of actor and critic
    training: dict[str, int]  # in addition, during training
    generation: dict[str, int]  # in addition, during generation
    weight_sync: dict[str, int]  # in addition, during weight sync
    host: dict[str, int]  # in host memory
    is_offloaded: bool
    other_engines: dict[str, dict[str, int]] = field(default_factory=dict)
    """By role, in addition while its engines are awake, which are not the policy's."""
    other_syncs: dict[str, dict[str, int]] = field(default_factory=dict)
    """By actor of another policy than the first, in addition during the sync of its weights."""

    @property
    def training_total(self) -> int:
        return sum(self.states.values()) + sum(self.training.values())

    @property
    def generation_total(self) -> int:
        # A reward model is onloaded for scoring while the engine is awake.
        return self._states_beside_engine(REWARD_WEIGHTS) + sum(self.generation.values())

    def other_engine_total(self, role: str) -> int:
        return self._states_beside_engine() + sum(self.other_engines[role].values())

    @property
    def weight_sync_total(self) -> int:
        return self._sync_total("actor", self.weight_sync)

    def other_sync_total(self, actor: str) -> int:
        return self._sync_total(actor, self.other_syncs[actor])

    def _sync_total(self, actor: str, parts: Mapping[str, int]) -> int:
        return self._states_beside_engine(f"{actor.replace('_', ' ')} weights") + sum(parts.values())

    def _states_beside_engine(self, onloaded: str = "") -> int:
        """Return the bytes of states on the device beside an engine. onloaded: the part that `train.offload` leaves."""
        return sum(
            size
            for name, size in self.states.items()
            if not self.is_offloaded or name == onloaded or name.endswith(FP8_COPIES)
        )

    @property
    def peak(self) -> int:
        others = [self.other_engine_total(role) for role in self.other_engines]
        others += [self.other_sync_total(actor) for actor in self.other_syncs]
        return max(self.training_total, self.generation_total, self.weight_sync_total, *others)


class InferenceStage(NamedTuple):
    """Memory, in bytes, of a rank of a pipeline stage of an inference-only model."""

    layers: tuple[int, ...]
    weights: int
    activations: int  # of one layer at a time
    logits: int = 0
    copies: int = 0  # of weights in FP8


class TrainedStage(NamedTuple):
    """Memory, in bytes, of a rank of a pipeline stage of a trained model."""

    layers: tuple[int, ...]
    activations: int
    inputs: int  # of its micro-batches
    states: dict[str, int]
    host: dict[str, int]  # by the optimizer's `offload_fraction`
    logits: int = 0
    gathered: int = 0  # with `train.fsdp`, weights and gradients of other ranks that exist at a time in a pass
    gathered_weights: int = 0  # weights of other ranks, all of which exist during weight sync


class ElementCounts(NamedTuple):
    """Numbers of elements on a rank."""

    dense: int = 0  # trained dense parameters, vocabulary padding included
    expert: int = 0  # trained parameters of routed experts
    frozen: int = 0  # dense parameters that LoRA freezes, and others that are not trained
    frozen_expert: int = 0  # parameters of routed experts that LoRA freezes
    biases: int = 0  # the routers' expert biases, not trained and kept in fp32


def plan_memory(
    hf: HFConfig,
    config: Config,
    requirements: Requirements,
    critic_hf: HFConfig | None = None,
    inference_models: Mapping[str, Sequence[InferenceStage]] | None = None,
    main_role: str = "",
    ranks: Collection[int] = (),
    other_models: Mapping[str, HFConfig] | None = None,
) -> list[StageMemory]:
    """Plan the memory of a rank of each pipeline stage of the actor, or of the reward model when that is trained.

    Roles that `placement` puts on other ranks are left out; of another role's stages on the ranks of a stage, the
    fullest counts. Raises ConfigError if the layout does not divide the model.

    critic_hf: None without a critic. inference_models: stages of inference-only models by role. main_role: the role to
    plan for instead; a role with engines for ranks with engines only, which have no stages. ranks: those of its ranks
    to plan for, all with the same models; by default all of them, where a role on some of them counts only there.
    other_models: models of roles with engines besides `rollout`, also where a policy's rollouts are replayed, and of
    other policies' critics; on a rank only one role's engines are awake at a time.
    """
    lead = main_role or requirements.main_role
    placement, inference = placement_of(config), inference_models or {}
    other_models = other_models or {}
    other_trained = [role for role in requirements.trained_roles if split_role(role)[1] and role != lead]
    ranks = set(ranks or placement.ranks_of(lead))
    local_roles = {lead} | {role for role in other_models if ranks & set(placement.ranks_of(role))}
    is_lead_engine = lead == "rollout" or lead in list_engine_roles(config, requirements.roles)
    if not is_lead_engine:
        roles = ("actor", "critic", "rollout", *other_trained, *inference)
        local_roles |= {role for role in roles if ranks & set(placement.ranks_of(role))}
    rollout, size, tokens = config.rollout, DTYPE_BYTES[config.model.dtype], _tokens(config, requirements)
    hf_by_role = {"actor": hf, "reward_model": hf, "critic": critic_hf}
    hf_by_role |= {role.replace("rollout_", "actor_"): model for role, model in other_models.items()}
    trained = {
        role: _trained_stages(model, config, role, tokens)
        for role in (() if lead in inference or is_lead_engine else (lead, "critic", *other_trained))
        if role in local_roles and (model := hf_by_role.get(role)) is not None
    }
    engine: dict[str, int] = {}
    if requirements.has_engines(config) and "rollout" in local_roles:
        engine = engine_parts(hf, rollout, size)
        if serves_adapters(config):
            engine["engine adapters"] = served_adapter_bytes(hf, config, size)
    other_engines = {
        role: {
            name.replace("engine", role): amount
            for name, amount in engine_parts(model, policy_config(config, role).rollout, size).items()
        }
        for role, model in other_models.items()
        if role in local_roles and role in list_engine_roles(config, requirements.roles)
    }
    lead_stages: Sequence[InferenceStage | TrainedStage] = inference.get(lead) or trained.get(lead) or ()
    layers = [stage.layers for stage in lead_stages] or [()]
    models: dict[str, Sequence[InferenceStage | TrainedStage]] = {**trained, **inference}
    local_ranks = np.array(sorted(ranks))
    local_stages = {  # [local ranks]
        role: _stage_by_rank(placement.ranks_of(role), len(models.get(role, layers)), placement.world)[local_ranks]
        for role in (lead, *models)
        if role in local_roles
    }
    computes = trained or local_roles & inference.keys() - {"reward"}
    stages: list[StageMemory] = []
    for stage, stage_layer_ids in enumerate(layers):
        states: dict[str, int] = {}
        offloaded_states: dict[str, int] = {}
        gathered: dict[str, int] = {}
        training = {"activations": 0, "logits": 0, "micro-batches": 0} if computes else {}
        in_stage = local_stages[lead] == stage
        if not in_stage.any():
            continue
        for role, model_stages in trained.items():
            numbers = set(local_stages[role][in_stage].tolist()) - {_ELSEWHERE}
            if not numbers:
                continue
            largest = max((model_stages[number] for number in numbers), key=lambda part: sum(part.states.values()))
            states |= largest.states
            offloaded_states |= largest.host
            # One model computes at a time, so the larger of the two counts.
            training["activations"] = max(training["activations"], largest.activations)
            training["micro-batches"] = max(training["micro-batches"], largest.inputs)
            training["logits"] = max(training["logits"], *(model_stages[number].logits for number in numbers))
            if config.train.fsdp:
                gathered[role] = largest.gathered_weights
                training["gathered layers"] = max(training.get("gathered layers", 0), largest.gathered)
        generation = dict(engine)
        host = offloaded_states | checkpoint_copies(config, {**states, **offloaded_states}, trained)
        for role in (role for role in inference if role in local_roles):
            numbers = set(local_stages[role][in_stage].tolist()) - {_ELSEWHERE}
            if not numbers:
                continue
            fullest = max((inference[role][number] for number in numbers), key=lambda part: part.weights)
            if config.model.megatron.get("fp8"):
                states[f"{'reward model' if role == 'reward' else role} {FP8_COPIES}"] = fullest.copies
            if role == "reward":  # it scores while the engine is awake
                states[REWARD_WEIGHTS] = fullest.weights
                generation["reward model activations"] = fullest.activations
                continue
            states[f"{role} weights"] = fullest.weights
            training["activations"] = max(training["activations"], fullest.activations)
            training["logits"] = max(training["logits"], fullest.logits)
        is_refreshed, is_separate = config.kl.refresh_reference_every > 0, has_separate_reference(config)
        copies = {"reference": states.get("reference weights", 0)} if is_separate else {}
        for role in (role for role in trained if split_role(role)[0] == "actor"):
            reference, name = role.replace("actor", "reference"), role.replace("_", " ")
            if reference not in requirements.roles or reference in copies:
                continue
            copies[reference] = states.get(f"{name} weights", 0)
            if config.lora.rank:  # gradients are fp32, of the adapters only
                copies[reference] = states.get(f"{name} gradients", 0) // 4 * size if is_refreshed else 0
            if copies[reference]:
                host[f"{reference.replace('_', ' ')} weights"] = copies[reference]
        if is_refreshed and config.run.save_every and any(copies.values()):  # staged, even without `run.save_async`
            host[PENDING_CHECKPOINT] = host.get(PENDING_CHECKPOINT, 0) + sum(copies.values())
            if num_copies := count_memory_copies(config):
                host[MEMORY_CHECKPOINTS] += num_copies * sum(copies.values())
        syncs: dict[str, dict[str, int]] = {}
        for role in requirements.trained_roles if requirements.has_rollout else ():
            base, policy = split_role(role)
            if base != "actor":
                continue
            has_own_engine = policy and not serves_adapters(config)
            name, engine_role = role.replace("_", " "), f"rollout_{policy}" if has_own_engine else "engine"
            policy_engine = other_engines.get(engine_role, {}) if has_own_engine else engine
            weights = states.get(f"{name} weights", 0) + gathered.get(role, 0)
            engine_weights = policy_engine.get(f"{engine_role} weights", 0)
            policy_settings = policy_config(config, role)
            sends_changes = syncs_changes(policy_settings)
            if weights and sends_changes:
                host["last synced weights"] = host.get("last synced weights", 0) + weights
            bucket = policy_settings.rollout.weight_sync_bucket_mb << 20
            if staged := sync_staging_bytes(bucket, weights, engine_weights) * (1 + sends_changes):
                syncs[role] = {f"{engine_role} weights": engine_weights, "reshard staging": staged}
                if role in gathered:
                    syncs[role]["gathered weights"] = gathered[role]
            if weights and config.guards.ppo_kl:
                model_bytes = (
                    states[f"{name} weights"] + states[f"{name} optimizer"] + host.get(f"{name} {OFFLOADED_STATES}", 0)
                )
                host["last good policy"] = host.get("last good policy", 0) + model_bytes
        if requirements.has_rollout and requirements.trained_roles and config.train.offload and states:
            host["states, while generating"] = sum(
                size for name, size in states.items() if "gradients" not in name and not name.endswith(FP8_COPIES)
            )
        if engine and syncs_adapters(config) and not serves_adapters(config):
            host["engine weights before merging"] = adapted_bytes(hf, config, size)
        if engine and sleeps_with_weights(config, requirements.roles, "rollout"):
            host["engine weights, asleep"] = engine["engine weights"]
        for role, parts in other_engines.items():
            if split_role(role)[1] and syncs_adapters(own := policy_config(config, role)):
                host[f"{role} weights before merging"] = adapted_bytes(other_models[role], own, size)
            if sleeps_with_weights(config, requirements.roles, role):
                host[f"{role} weights, asleep"] = parts[f"{role} weights"]
        offloaded, weight_sync = requirements.has_rollout and config.train.offload, syncs.pop("actor", {})
        parts_by_phase = states, training, generation, weight_sync, host
        stages.append(StageMemory(stage, stage_layer_ids, *parts_by_phase, offloaded, other_engines, syncs))
    return stages


VLLM_BLOCK_TOKENS = 32
"""Tokens per block of vLLM's KV cache."""


def max_cached_tokens(rollout: RolloutConfig) -> int:
    """Return the tokens that settings of the engines allow in a KV cache; 0 if they set no limit."""
    blocks = int(rollout.vllm.get("num_gpu_blocks_override") or 0)
    return int(rollout.sglang.get("max_total_tokens") or blocks * VLLM_BLOCK_TOKENS)


def engine_parts(hf: HFConfig, rollout: RolloutConfig, size: int) -> dict[str, int]:
    """Return the memory of an engine on one of its ranks, by part. size: bytes per element."""
    # Settings cap the cache; otherwise it must hold all of the engine's conversations.
    cached = max_cached_tokens(rollout) or rollout.concurrency * rollout.max_context
    drafts = bool(rollout.num_speculative_tokens)
    parts = {
        "engine weights": engine_bytes(hf, rollout.tp, size, drafts, copies=rollout.num_redundant_experts),
        "engine KV cache": cached * kv_elements(hf, rollout.tp, drafts) * size,
    }
    if request_states := state_bytes_of_delta_nets(hf, rollout.tp, size):
        slots = int(rollout.sglang.get("max_mamba_cache_size") or STATES_PER_REQUEST * rollout.concurrency)
        if drafts:  # those after each token of a window, of which the rejected are dropped
            requests = int(rollout.sglang.get("max_running_requests") or rollout.concurrency)
            slots += (requests + 1) * (rollout.num_speculative_tokens + 1)
        parts["engine states"] = slots * request_states
    return parts


_ELSEWHERE = -1


@cache
def _stage_by_rank(members: tuple[int, ...], count: int, world: int) -> NDArray[np.int64]:
    """Return [world] the pipeline stage of each rank in a model with `count` stages, which are runs of consecutive
    members; `_ELSEWHERE` for ranks without it."""
    stages = np.full(world, _ELSEWHERE)
    stages[list(members)] = np.arange(len(members)) * count // len(members)
    return stages


def _trained_stages(hf: HFConfig, job_config: Config, role: str, tokens: int) -> list[TrainedStage]:
    """Return the memory of a trained model by pipeline stage. tokens: of a micro-batch on a rank."""
    config, policy = role_config(job_config, role), policy_config(job_config, role)
    is_actor = split_role(role)[0] == "actor"
    optimizer = policy.actor_optimizer if is_actor else policy.critic.optimizer
    fraction, is_muon = optimizer.offload_fraction, optimizer.type == "muon"
    parallel, size = config.parallel, DTYPE_BYTES[config.model.dtype]
    settings, layers = _settings_and_layers(hf, config)
    dp = parallel.world_size // (parallel.tp * parallel.pp)  # including cp: optimizer states are sharded over both
    expert_dp = max(1, parallel.world_size // (parallel.pp * parallel.ep * parallel.etp))
    mtp = num_trained_mtp(hf, config) if is_actor else 0
    replays, indices = (is_actor and key for key in (config.train.routing_replay, config.train.sparse_index_replay))
    stages = []
    indexer, frozen_tower = is_actor and config.train.indexer_loss_coef > 0, config.model.freeze_vision_tower
    variant = ModelVariant(not is_actor, config.lora, bool(mtp), indexer, frozen_tower)
    by_stage = stage_elements(hf, parallel, layers, variant)
    matrices = stage_matrices(hf, parallel, layers, variant) if is_muon else [((), ())] * len(layers)
    copies = stage_fp8_copies(hf, parallel, layers, settings, variant)
    for stage, elements in enumerate(by_stage):
        packed = [pack(each, ranks) for each, ranks in zip(matrices[stage], (dp, expert_dp), strict=True)]
        whole = state_bytes(elements, dp, expert_dp, size, fraction, *packed)
        stored = sharded_state_bytes(elements, dp, expert_dp, size) if config.train.fsdp else whole
        parts = stored, offloaded_bytes(elements, dp, expert_dp, fraction)
        states, host = ({f"{role.replace('_', ' ')} {part}": amount for part, amount in each.items()} for each in parts)
        if settings.get("fp8"):
            states[f"{role.replace('_', ' ')} {FP8_COPIES}"] = copies[stage]
        saved, work, inputs = training_bytes(settings, layers, stage, parallel, tokens, size, mtp, replays, indices)
        logits = _logits_bytes(hf, config, tokens, size) if is_actor and stage == len(layers) - 1 else 0
        activations = saved + max(work - logits, 0)  # the work of a layer begins when the logits are gone
        stages.append(TrainedStage(layers[stage], activations, ceil(inputs), states, host, logits=logits))
        if config.train.fsdp:
            gathered = whole["weights"] - stored["weights"], gathered_in_pass(hf, parallel, variant, size)
            stages[-1] = stages[-1]._replace(gathered_weights=gathered[0], gathered=gathered[1])
    return stages


def inference_stages(
    hf: HFConfig, config: Config, requirements: Requirements, head: bool, dtype: str = "float32"
) -> list[InferenceStage]:
    """Return the memory of an inference-only model by pipeline stage. head: whether it has a value head."""
    parallel, tokens, size = config.parallel, _tokens(config, requirements), DTYPE_BYTES[dtype]
    settings, layers = _settings_and_layers(hf, config)
    stages, variant = [], ModelVariant(head)
    by_stage = stage_elements(hf, parallel, layers, variant)
    copies = stage_fp8_copies(hf, parallel, layers, settings, variant, trains=False)
    for stage_layer_ids, elements, copied in zip(layers, by_stage, copies, strict=True):
        widest = max((layer_elements(settings, layer, parallel.etp) for layer in stage_layer_ids), default=0)
        weights = size * (sum(elements) - elements.biases) + 4 * elements.biases
        logits = 0 if head or stage_layer_ids != layers[-1] else _logits_bytes(hf, config, tokens, size)
        activations = max(size * widest * tokens // parallel.tp - logits, 0)  # a layer's, before the logits
        stages.append(InferenceStage(stage_layer_ids, weights, activations, logits, copied))
    return stages


def _logits_bytes(hf: HFConfig, config: Config, tokens: int, size: int) -> int:
    tp, at_once = config.parallel.tp, config.train.logits_chunk_size
    return logits_bytes(hf["vocab_size"], hf["hidden_size"], tp, tokens, at_once, size)


def classifier_stages(hf: HFConfig, elements: int, dtype: str, config: Config) -> list[InferenceStage]:
    """Return the memory of any classifier, replicated on each of its ranks. Activations assume a typical layer."""
    layers, size = tuple(range(int(hf.get("num_hidden_layers") or 1))), DTYPE_BYTES[dtype]
    width = 6 * int(hf.get("hidden_size") or 0) + 3 * int(hf.get("intermediate_size") or 0)
    return [InferenceStage(layers, size * elements, size * width * config.train.max_tokens_per_gpu)]


def _tokens(config: Config, requirements: Requirements) -> int:
    """Return the largest number of tokens of a micro-batch on a rank: the budget, or its part of a longer sequence."""
    longest = config.rollout.max_context if requirements.has_rollout else 0
    return max(config.train.max_tokens_per_gpu, -(-longest // config.parallel.cp))


def _settings_and_layers(hf: HFConfig, config: Config) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Return `megatron_settings` and the decoder layers of each stage."""
    settings, parallel = megatron_settings(hf, config), config.parallel
    return settings, stage_layers(int(settings["num_layers"]), parallel.pp, settings, parallel.vpp)


def unique_params(hf: HFConfig, mtp: bool = False) -> list[tuple[Param, int]]:
    """Return the family's table with one routed expert per layer, and the multiplicity of each parameter.

    mtp: include the multi-token prediction layers.
    """
    return _unique_params(_to_json(hf), mtp)


def _to_json(hf: HFConfig) -> str:
    return json.dumps(dict(hf), sort_keys=True)


@cache
def _unique_params(text: str, mtp: bool) -> list[tuple[Param, int]]:
    """Implement `unique_params`, cached by the config's text: a layout search needs the same table many times."""
    hf = json.loads(text)
    family = family_of(hf)
    rows = family.params(hf, 1, mtp=mtp, max_experts=1)
    return [(row, 1 if row.expert is None else family.num_experts(hf)) for row in rows]


def critic_params(policy: Sequence[Param], hidden: int) -> list[Param]:
    """Return a policy's table with a value head in place of the output layer."""
    head = Param("output_layer.weight", (HFTensor("score.weight", (1, hidden)),), Replicated())
    return [*(param for param in policy if param.megatron != head.megatron), head]


@dataclass(frozen=True)
class ModelVariant:
    """Which parameters of a model's table a role has, and which of them are trained.

    head: a value head replaces the output layer.
    mtp: include the multi-token prediction layers.
    indexer: the indexers of sparse attention are trained.
    freezes_tower: a vision tower is not trained.
    """

    head: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    mtp: bool = False
    indexer: bool = False
    freezes_tower: bool = False


POLICY = ModelVariant()
"""The model itself, all of it trained except for indexers."""


def stage_elements(
    hf: HFConfig, parallel: ParallelConfig, stages: Sequence[Sequence[int]], variant: ModelVariant = POLICY
) -> list[ElementCounts]:
    """Return the element counts on one rank of each pipeline stage. stages: the decoder layers of each.

    Raises ConfigError if tp or etp does not divide the model, or a LoRA target does not exist.
    """
    by_layer = _elements_by_part(hf, parallel, variant)
    return [_sum(by_layer.get(name, ElementCounts()) for name in stage) for stage in _parts_of_stages(stages)]


def _parts_of_stages(stages: Sequence[Sequence[int]]) -> list[list[int | str]]:
    """Return the layers and other parts of each pipeline stage."""
    names: list[list[int | str]] = [list(stage) for stage in stages]
    names[0] += BEFORE_DECODER
    names[-1].append("final")
    if len(stages) > 1:
        names[-1].append("embedding copy")
    return names


def stage_matrices(
    hf: HFConfig, parallel: ParallelConfig, stages: Sequence[Sequence[int]], variant: ModelVariant = POLICY
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the elements of each matrix that Muon updates on one rank of each stage: dense ones, and experts'.

    Arguments are those of `stage_elements`.
    """
    rows = _list_rows(_to_json(hf), parallel.tp, parallel.etp, parallel.ep, variant)
    matrices = [(part, row) for part, rows_of_part in rows.items() for row in rows_of_part if row.is_matrix]

    def sizes_of(names: Collection[int | str], field: str) -> tuple[int, ...]:
        rows = (row for part, row in matrices if part in names and row.field == field)
        return tuple(row.size for row in rows for _ in range(row.copies))

    return [(sizes_of(set(names), "dense"), sizes_of(set(names), "expert")) for names in _parts_of_stages(stages)]


_LINEAR = re.compile(r"(decoder|mtp)\..*\.(linear_\w+|in_proj|out_proj|eh_proj)\.weight")
"""Canonical names of weights of Transformer Engine's linear layers. Embedding, router, output layer, value head,
adapters and vision tower are computed without it."""
_FP8_SCALES = {"blockwise": 4 / BLOCK**2, "mxfp8": 1 / 32}
"""Bytes of scales per element by `fp8_recipe`; otherwise there is one scale for a matrix."""


def stage_fp8_copies(
    hf: HFConfig,
    parallel: ParallelConfig,
    stages: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    variant: ModelVariant = POLICY,
    trains: bool = True,
) -> list[int]:
    """Return the bytes of FP8 copies of weights on one rank of each stage; 0 for all without FP8.

    Each of Transformer Engine's linear layers has a copy of its weight by rows, for outputs, and if the model `trains`
    another by columns, for gradients of inputs. They exist from its first pass on, also while engines generate.

    settings: see `megatron_settings`. Other arguments are those of `stage_elements`.
    """
    if not settings.get("fp8") or settings.get("disable_parameter_transpose_cache"):
        return [0] * len(stages)
    rows = _list_rows(_to_json(hf), parallel.tp, parallel.etp, parallel.ep, variant)
    elements = {part: sum(row.size * row.copies for row in each if row.is_linear) for part, each in rows.items()}
    if settings.get("first_last_layers_bf16"):
        layers = range(int(settings["num_layers"]))
        first, last = (int(settings.get(f"num_layers_at_{end}_in_bf16", 1)) for end in ("start", "end"))
        elements |= dict.fromkeys([*layers[:first], *layers[len(layers) - last :]], 0)
    per_element = (1 + trains) * (1 + _FP8_SCALES.get(settings.get("fp8_recipe", FP8_RECIPE), 0))
    return [ceil(per_element * sum(elements.get(part, 0) for part in parts)) for parts in _parts_of_stages(stages)]


class PackedMatrices(NamedTuple):
    """The matrices of a rank's part of a model, each with its states on one of the data parallel ranks."""

    elements: int = 0
    largest: int = 0  # on the rank with the most


@cache
def pack(sizes: tuple[int, ...], ranks: int) -> PackedMatrices:
    """Assign matrices to data parallel ranks as Megatron does: the largest first, each to the rank with the fewest
    elements, whose matrices start at multiples of 64. With `train.ddp.overlap_grad_reduce` it does so per bucket."""
    loads = [(0, 0)] * ranks  # padded, exact
    for size in sorted(sizes, reverse=True):
        padded, exact = heapq.heappop(loads)
        heapq.heappush(loads, (ceil(padded / 64) * 64 + size, exact + size))
    return PackedMatrices(sum(sizes), max(exact for _, exact in loads))


def _sum(parts: Iterable[ElementCounts]) -> ElementCounts:
    return ElementCounts(*map(sum, zip(ElementCounts(), *parts, strict=True)))


class _Row(NamedTuple):
    """A parameter of a rank, as often as it has experts like it."""

    field: str  # of `ElementCounts`
    size: int
    copies: int
    is_matrix: bool  # that Muon updates
    is_linear: bool  # of Transformer Engine, in FP8 if that is set


def _elements_by_part(hf: HFConfig, parallel: ParallelConfig, variant: ModelVariant) -> dict[int | str, ElementCounts]:
    return {
        part: _sum(ElementCounts(**{row.field: row.size * row.copies}) for row in rows)
        for part, rows in _list_rows(_to_json(hf), parallel.tp, parallel.etp, parallel.ep, variant).items()
    }


@cache
def _list_rows(text: str, tp: int, etp: int, ep: int, variant: ModelVariant) -> dict[int | str, list[_Row]]:
    """Return a rank's parameters of each layer, of the embedding, of the final layers, and of the embedding's copy.

    The last stage holds that copy if the embedding is tied or used by multi-token prediction.
    """
    hf = json.loads(text)
    params, experts = [param for param, _ in _unique_params(text, variant.mtp)], family_of(hf).num_experts(hf)
    if variant.head:
        params = critic_params(params, int(hf["hidden_size"]))
    is_tied = all(param.megatron != "output_layer.weight" for param in params)
    if variant.lora.rank:
        params = params + adapter_params(params, variant.lora)
    rows: dict[int | str, list[_Row]] = {}
    for param in params:
        shape = local_shape(param, tp if param.expert is None else etp, 0)
        field, size, count = "dense", prod(shape), 1
        if param.expert is not None:
            field, count = "expert", experts // ep
        if param.is_buffer or (is_indexer(param) and not variant.indexer and param.dtype is not None):
            field = "biases"
        elif is_indexer(param) and not variant.indexer:
            field = "frozen"
        elif variant.freezes_tower and param.megatron.startswith(TOWER):
            field = "frozen"
        elif variant.lora.rank and param.slot is not None:  # adapters and a value head have no engine slot
            field = "frozen" if param.expert is None else "frozen_expert"
        layer = layer_of(param.megatron)
        end = next((part for part in BEFORE_DECODER if param.megatron.startswith(part)), "final")
        part = end if layer is None else layer
        is_matrix = len(shape) == 2 and not any(name in param.megatron for name in ("embed", "output_layer."))
        is_trained_matrix = is_matrix and field in ("dense", "expert")
        is_linear = _LINEAR.fullmatch(param.megatron) is not None
        rows.setdefault(part, []).append(_Row(field, size, count, is_trained_matrix, is_linear))
    if is_tied or variant.mtp:
        rows["embedding copy"] = rows["embedding."]
    return rows


def state_bytes(
    elements: ElementCounts,
    dp: int,
    expert_dp: int,
    size: int,
    offloaded: float = 0.0,
    matrices: PackedMatrices = PackedMatrices(),  # noqa: B008  immutable
    expert_matrices: PackedMatrices = PackedMatrices(),  # noqa: B008
) -> dict[str, int]:
    """Return the device bytes of weights, fp32 gradients, and the rank's shard of master weights and two moments.

    Per element, with the optimizer sharded over d ranks: 6 + 12 / d bytes in bf16 and 8 + 8 / d in fp32, where the
    weights are their own masters, as in Megatron-Core's guide to its distributed optimizer.

    dp, expert_dp: ranks over which states of dense parameters, and those of experts, are sharded.
    offloaded: share of masters and moments on the host. Whole parameters are, so it may be up to one parameter more.
    matrices, expert_matrices: those that Muon updates, with one moment of two, on the rank with the most of them;
        buffers of weights and of gradients have room for as many on each rank.
    """
    dense, expert, frozen, frozen_expert, biases = elements
    states, optimizer, padding = 12 if size == 2 else 8, 0, 0
    for count, ranks, packed in ((dense, dp, matrices), (expert, expert_dp, expert_matrices)):
        optimizer += ceil((1 - offloaded) * states * (count - packed.elements) / ranks) + (states - 4) * packed.largest
        padding += ranks * packed.largest - packed.elements
    return {
        "weights": (dense + expert + frozen + frozen_expert + padding) * size + biases * 4,
        "gradients": (dense + expert + padding) * 4,
        "optimizer": optimizer,
    }


def sharded_state_bytes(elements: ElementCounts, dp: int, expert_dp: int, size: int) -> dict[str, int]:
    """Return `state_bytes` with `train.fsdp`: weights and gradients are sharded like masters and moments."""
    dense, expert, frozen, frozen_expert, biases = elements
    trained = ceil(dense / dp) + ceil(expert / expert_dp)
    return {
        "weights": (trained + ceil(frozen / dp) + ceil(frozen_expert / expert_dp)) * size + biases * 4,
        "gradients": trained * 4,
        "optimizer": trained * (12 if size == 2 else 8),
    }


def gathered_in_pass(hf: HFConfig, parallel: ParallelConfig, variant: ModelVariant, size: int) -> int:
    """Return an upper bound on the bytes that Megatron-FSDP gathers, and has to reduce, at a time in a pass.

    Weights of the parts that are no layers, and of a layer with those fetched ahead of it, of half of 1e9 elements and
    up to a layer more; fp32 gradients of the same parts, and of the layers waiting to be reduced, of at least 1e9
    elements (`suggested_communication_unit_size` in megatron_fsdp.py).

    size: bytes of a weight.
    """
    by_part = _elements_by_part(hf, parallel, variant)
    sizes = {part: sum(count) - count.biases for part, count in by_part.items()}
    trained = {part: count.dense + count.expert for part, count in by_part.items()}
    layers = [part for part in sizes if isinstance(part, int)]
    unit = max(10**9, 2 * sum(sizes[layer] for layer in layers) // len(layers))

    def gathered(counts: Mapping[int | str, int], ahead: int) -> int:
        others = sum(counts.get(part, 0) for part in (*BEFORE_DECODER, "final"))
        by_layer = [counts[layer] for layer in layers]
        return others + min(sum(by_layer), max(by_layer) + ahead)

    ahead = unit // 2 + max(sizes[layer] for layer in layers)
    return gathered(sizes, ahead) * size + gathered(trained, unit) * 4


def offloaded_bytes(elements: ElementCounts, dp: int, expert_dp: int, offloaded: float) -> dict[str, int]:
    """Return the host bytes of the share `offloaded` of master weights and moments, and of its gradients, all fp32.

    Gradients are in page-locked allocations of powers of two, which are not counted.
    """
    shares = (ceil(offloaded * count / n) for count, n in ((elements.dense, dp), (elements.expert, expert_dp)))
    count = sum(shares)
    return {OFFLOADED_STATES: 12 * count, "gradients, offloaded": 4 * count} if offloaded else {}


def engine_bytes(
    hf: HFConfig, tp: int, size: int, drafts: bool = False, lora: LoraConfig | None = None, copies: int = 0
) -> int:
    """Return the bytes of weights on one rank of an SGLang engine.

    A rank has 1 / tp of the experts, whether these are distributed (EP) or sharded (TP).

    size: bytes per element. FP8 weights of an FP8 checkpoint take one byte, plus a scale per block; experts of an INT4
        checkpoint half a byte, plus a scale per group.
    drafts: include the multi-token prediction layers.
    copies: redundant experts of each layer.
    lora: count only weights with adapters.
    """
    experts = family_of(hf).num_experts(hf)
    total, fp8, has_int4_experts = float(family_of(hf).engine_only_elements(hf) * size), is_fp8(hf), int4.is_int4(hf)
    counts = list(unique_params(hf, drafts))
    if lora is not None:
        adapted = {param.megatron for param in adapted_weights([row for row, _ in counts], lora.target_modules)}
        total, counts = 0.0, [row for row in counts if row[0].megatron in adapted]
    for param, count in counts:
        elements = _rank_elements(param, count, tp)
        if param.expert is not None:
            elements += elements * copies // experts
        if has_int4_experts and int4.is_quantised(param):
            total += elements * (0.5 + 2 / int4.GROUP)
        else:
            total += elements * (1 + 4 / BLOCK**2 if fp8 and is_quantised(param) else size)
    return round(total)


def _rank_elements(param: Param, count: int, tp: int) -> int:
    """Return the elements of a parameter on one rank of an engine. count: of experts, otherwise 1."""
    if isinstance(param.sharding, Replicated) and param.expert is None:
        return param.size
    if isinstance(param.sharding, QKVSharding | GatedQKVSharding):
        q, k, v = (prod(tensor.shape) for tensor in param.hf)
        return q // tp + (k + v) // min(tp, param.sharding.num_kv_heads)
    if isinstance(param.sharding, FusedSharding):
        heads, kv_heads, _ = param.sharding.units
        head = param.size // sum(param.sharding.units)
        return head * (heads // tp + 2 * kv_heads // min(tp, kv_heads))
    return -(-param.size * count // tp)


def served_adapter_bytes(hf: HFConfig, config: Config, size: int) -> int:
    """Return the bytes of the adapters that one rank of an engine serves, one for each of `rollout.max_loras`. Models
    have no experts then. size: bytes per element."""
    rows = adapted_weights([row for row, _ in unique_params(hf, False)], config.lora.target_modules)
    factors = (factor for row in rows for factor in factor_params(row, config.lora.rank))
    elements = sum(_rank_elements(factor, 1, config.rollout.tp) for factor in factors)
    return config.rollout.max_loras * elements * size


def adapted_bytes(hf: HFConfig, config: Config, size: int) -> int:
    """Return the bytes of the weights with adapters on one rank of an engine, see `engine_bytes`."""
    rollout = config.rollout
    return engine_bytes(hf, rollout.tp, size, bool(rollout.num_speculative_tokens), config.lora)


def kv_elements(hf: HFConfig, tp: int, drafts: bool = False) -> int:
    """Return the KV cache elements per token on one engine rank: keys and values of its heads, or the full latent.

    drafts: include the multi-token prediction layers.
    """
    family, settings = family_of(hf), family_of(hf).megatron_config(hf)
    layers = int(settings["num_layers"]) + (family.num_mtp_layers(hf) if drafts else 0)
    if settings.get("multi_latent_attention"):
        latents = layers * (int(settings["kv_lora_rank"]) + int(settings["qk_pos_emb_head_dim"]))
        if not settings.get("dsa_indexer_topk"):
            return latents
        # The indexers' keys are cached in FP8 with a scale of 4 bytes per 128, which are half as many elements in bf16.
        size = int(settings["dsa_indexer_head_dim"])
        indexers = indexer_types(hf).count("full") + layers - int(settings["num_layers"])
        return latents + indexers * (size + 4 * -(-size // 128)) // 2
    layers -= sum(settings.get("linear_attention_freq") or ())
    return 2 * layers * max(1, int(settings["num_query_groups"]) // tp) * int(settings["kv_channels"])


def state_bytes_of_delta_nets(hf: HFConfig, tp: int, size: int) -> int:
    """Return the bytes of a request's states on one engine rank: in FP32, and the last inputs of the convolutions."""
    settings = family_of(hf).megatron_config(hf)
    keys, values = (int(settings.get(f"linear_num_{kind}_heads") or 0) for kind in ("key", "value"))
    key_size, value_size = (int(settings.get(f"linear_{kind}_head_dim") or 0) for kind in ("key", "value"))
    inputs = (int(settings.get("linear_conv_kernel_dim") or 1) - 1) * (2 * keys * key_size + values * value_size)
    layers = sum(settings.get("linear_attention_freq") or ())
    return layers * (4 * values * key_size * value_size + size * inputs) // tp


def sync_staging_bytes(bucket: int, weights: int, engine: int) -> int:
    """Return an upper bound on a rank's staging memory of a weight sync: two half buckets to send, two to receive."""
    return 2 * min(bucket // 2, weights) + 2 * min(bucket // 2, engine)
