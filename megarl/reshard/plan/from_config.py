"""Layouts and weight-sync plans for a configuration, and advice on splitting layers over pipeline stages.

Weights that only one stage holds can be sent only by its GPUs, so the stage with the most to send sets the pace.
`advise_split` minimises its bytes; it does not consider whether the stages also balance in compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.config import Config, ConfigError, server_args
from megarl.models.fp8 import is_fp8
from megarl.models.layout_algebra import HFConfig
from megarl.models.pipeline_stages import stage_layers
from megarl.parallel.placement import placement_of
from megarl.reshard.plan import engine_settings
from megarl.reshard.plan.bound import Columns, expand_to_ranks, list_layer_columns
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, Wire, build_rank_map
from megarl.reshard.plan.planner import ReshardPlan

SPLIT_TOLERANCE = 1.002  # among splits within this factor of the best, prefer the most even


@dataclass(frozen=True)
class SplitAdvice:
    """Layers of each stage, and bytes that each GPU of the busiest stage has to send: current and recommended."""

    current: tuple[int, ...]
    recommended: tuple[int, ...]
    current_bytes: float
    recommended_bytes: float

    @property
    def gain(self) -> float:
        return 1 - self.recommended_bytes / self.current_bytes if self.current_bytes else 0.0


def advise_split(
    hf: HFConfig, train: TrainLayout, engine: EngineLayout, ranks_per_node: int, wire: Wire = "bf16", vpp: int = 1
) -> SplitAdvice:
    """Find the best of all splits that a run can have.

    The first and the last stage may have any number of layers, those in between have equal numbers, and each stage has
    at least one layer, or one for each of its `vpp` parts. Bytes are those that leave the node, or those that leave the
    GPU if there is only one node.
    """
    model = list_layer_columns(hf, train, engine, wire)
    rank_map = build_rank_map(train, engine, ranks_per_node)
    costs_by_stage: dict[tuple[int, int], float] = {}

    def cost(columns: Columns, stage: int) -> float:
        """Return the bytes that each GPU of the stage has to send for a layer placed there."""
        key = id(columns), stage
        if key not in costs_by_stage:
            size = rank_map.ranks_per_node if rank_map.ranks_per_node < rank_map.world else 1
            holds, needs = (
                np.array(matrix.reshape(-1, size, len(columns.weight)).any(1))
                for matrix in expand_to_ranks(columns, stage, train, engine, rank_map)
            )
            costs_by_stage[key] = float((columns.weight * (needs & ~holds).sum(0)).sum() / train.stage_ranks)
        return costs_by_stage[key]

    fixed = [sum(cost(m.columns, m.stage) for m in model if m.layer is None and m.stage == s) for s in range(train.pp)]
    layers = [member.columns for member in model if member.layer is not None]
    costs = np.array([[cost(columns, s) for columns in layers] for s in range(train.pp)])

    def busiest(stages: Sequence[Sequence[int]]) -> float:
        return max(fixed[s] + float(costs[s, list(layer_ids)].sum()) for s, layer_ids in enumerate(stages))

    current = tuple(len(layer_ids) for layer_ids in train.stages)
    loads = {current: busiest(train.stages)}
    for counts in splits(len(layers), train.pp, vpp):
        ends = {"num_layers_in_first_pipeline_stage": counts[0], "num_layers_in_last_pipeline_stage": counts[-1]}
        loads[counts] = busiest(stage_layers(len(layers), train.pp, ends if train.pp > 1 else {}, vpp))
    limit = min(loads.values()) * SPLIT_TOLERANCE
    best = min((sum(count**2 for count in counts), load, counts) for counts, load in loads.items() if load <= limit)
    return SplitAdvice(current, best[2], loads[current], best[1])


def splits(layers: int, pp: int, vpp: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of layers per stage, in all ways that a run can have them."""
    if pp == 1:
        yield (layers,)
        return
    for middle in range(vpp, layers, vpp) if pp > 2 else (0,):
        ends = layers - middle * (pp - 2)
        for first in range(vpp, ends - vpp + 1, vpp):
            if (ends - first) % vpp == 0:
                yield (first, *[middle] * (pp - 2), ends - first)


WIRE_BY_DTYPE: dict[str, Wire] = {"bfloat16": "bf16", "float32": "fp32"}


def train_layout(hf: HFConfig, config: Config, ranks: Sequence[int] | None = None) -> TrainLayout:
    """Return the trainer's layout of a configuration. ranks: the trainer's job ranks; all ranks by default."""
    parallel = config.parallel
    stages = stage_layers(int(hf["num_hidden_layers"]), parallel.pp, config.model.megatron, parallel.vpp)
    world, chosen = (parallel.world_size, ()) if ranks is None else (len(ranks), tuple(ranks))
    return TrainLayout(world, parallel.tp, parallel.ep, tuple(stages), parallel.etp, parallel.cp, chosen)


def engine_layout(config: Config) -> EngineLayout:
    """Return the engines' layout of a configuration. Raises ConfigError for settings that the reshard cannot serve."""
    settings, tp = config.rollout.sglang, config.rollout.tp
    server_args.check(settings)
    engine_settings.check(settings)
    attention = int(settings.get("attn_dp_size") or settings.get("dp_size") or 1)
    if attention > 1 and not (settings.get("attn_dp_size") or settings.get("enable_dp_attention")):
        raise ConfigError(
            "rollout.sglang.dp_size: the number of engines follows from the ranks; set rollout.tp, or attn_dp_size"
        )
    if settings.get("enable_dp_lm_head") and attention == 1:
        raise ConfigError("rollout.sglang.enable_dp_lm_head needs replicas of the attention: also set attn_dp_size")
    dense = settings.get("moe_dense_tp_size")
    if dense not in (None, 1, tp):
        raise ConfigError(f"rollout.sglang.moe_dense_tp_size={dense}: SGLang knows 1 and rollout.tp={tp} only")
    sends_tokens = settings.get("moe_a2a_backend", "none") != "none"
    if sends_tokens:
        where = f"rollout.sglang.moe_a2a_backend={settings['moe_a2a_backend']}"
        if config.rollout.ep != tp:
            raise ConfigError(
                f"{where} divides the experts among all ranks of an engine: set rollout.ep to rollout.tp={tp}"
            )
        if tokens := config.rollout.num_speculative_tokens:
            raise ConfigError(
                f"{where} with rollout.num_speculative_tokens={tokens}: not reviewed for the shared experts of a draft "
                "model; set only one of them"
            )
        if settings.get("enforce_shared_experts_fusion"):
            raise ConfigError(f"{where} with enforce_shared_experts_fusion: not tested; remove the second")
    return EngineLayout(
        tp,
        config.rollout.ep,
        attention,
        mlp_tp=int(dense or 0),
        shared_tp=1 if sends_tokens else 0,  # SGLang then has the shared experts whole on each rank
        head_tp=tp // attention if settings.get("enable_dp_lm_head") else 0,
        # An untrained draft model stays as loaded.
        draft=bool(config.rollout.num_speculative_tokens and config.train.mtp_loss_coef),
    )


def build_plan(
    hf: HFConfig,
    config: Config,
    engine: EngineLayout,
    train_ranks: Sequence[int] | None = None,
    engine_ranks: Sequence[int] | None = None,
) -> ReshardPlan:
    """Build the weight-sync plan. Raises ConfigError if the weights cannot be synced.

    train_ranks, engine_ranks: job ranks of the trainer, in the order of its layout, and of the engines, one after
    another; all ranks of the job by default.
    """
    wire = WIRE_BY_DTYPE.get(config.model.dtype)
    if wire is None:
        raise ConfigError(f"model.dtype={config.model.dtype}: weights can be synced in {' or '.join(WIRE_BY_DTYPE)}")
    if is_fp8(hf):
        if wire != "bf16":
            raise ConfigError(
                f"model.dtype={config.model.dtype}: the engine of an FP8 checkpoint keeps the rest in bfloat16; set "
                "model.dtype=bfloat16"
            )
        wire = "fp8"
    ranks_per_node, bucket_bytes = config.parallel.ranks_per_node, config.rollout.weight_sync_bucket_mb << 20
    try:
        train = train_layout(hf, config, train_ranks)
        if train_ranks is not None or engine_ranks is not None:
            all_ranks = range(config.parallel.world_size)
            engine = replace(engine, ranks=tuple(all_ranks if engine_ranks is None else engine_ranks))
        return ReshardPlan(hf, train, engine, ranks_per_node, bucket_bytes, wire)
    except ConfigError as error:
        raise ConfigError(f"the weights cannot be synced to the engines: {error}") from None


def plan_from_config(hf: HFConfig, config: Config) -> ReshardPlan:
    """Build the plan from the actor's ranks to the engines', as placed by `placement`."""
    placement = placement_of(config)
    sides = () if placement.is_colocated else (placement.ranks_of("actor"), placement.ranks_of("rollout"))
    return build_plan(hf, config, engine_layout(config), *sides)
