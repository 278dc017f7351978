"""Layouts and weight-sync plans for a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.config import Config, ConfigError
from megarl.models.fp8 import is_fp8
from megarl.models.int4 import is_int4
from megarl.models.layout_algebra import HFConfig
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of
from megarl.parallel.placement import placement_of
from megarl.reshard.plan.adapters import AdapterTable
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, Wire
from megarl.reshard.plan.planner import ReshardPlan

WIRE_BY_DTYPE: dict[str, Wire] = {"bfloat16": "bf16", "float32": "fp32"}


def train_layout(hf: HFConfig, config: Config, ranks: Sequence[int] | None = None) -> TrainLayout:
    """Return the trainer's layout of a configuration. ranks: the trainer's job ranks; all ranks by default."""
    parallel = config.parallel
    stages = stage_layers(int(hf["num_hidden_layers"]), parallel.pp, config.model.megatron, parallel.vpp)
    world, chosen = (parallel.world_size, ()) if ranks is None else (len(ranks), tuple(ranks))
    return TrainLayout(world, parallel.tp, parallel.ep, tuple(stages), parallel.etp, parallel.cp, chosen)


def build_plan(
    hf: HFConfig,
    config: Config,
    engine: EngineLayout,
    train_ranks: Sequence[int] | None = None,
    engine_ranks: Sequence[int] | None = None,
    adapters: bool = False,
) -> ReshardPlan:
    """Build the weight-sync plan. Raises ConfigError if the weights cannot be synced.

    adapters: of LoRA's adapters alone, see `reshard.plan.adapters`.

    train_ranks, engine_ranks: job ranks of the trainer, in the order of its layout, and of the engines, one after
    another; all ranks by default.
    """
    wire = WIRE_BY_DTYPE.get(config.model.dtype)
    if wire is None:
        raise ConfigError(f"model.dtype={config.model.dtype}: weights can be synced in {' or '.join(WIRE_BY_DTYPE)}")
    quantised: Wire | None = "fp8" if is_fp8(hf) else "int4" if is_int4(hf) else None
    if quantised is not None:
        if wire != "bf16":
            raise ConfigError(
                f"model.dtype={config.model.dtype}: the engine of an {quantised.upper()} checkpoint keeps the rest in "
                "bfloat16; set model.dtype=bfloat16"
            )
        wire = wire if adapters else quantised
    ranks_per_node, bucket_bytes = config.parallel.ranks_per_node, config.rollout.weight_sync_bucket_mb << 20
    try:
        train = train_layout(hf, config, train_ranks)
        if train_ranks is not None or engine_ranks is not None:
            all_ranks = range(config.parallel.world_size)
            engine = replace(engine, ranks=tuple(all_ranks if engine_ranks is None else engine_ranks))
        table = AdapterTable(family_of(hf), config.lora, engine) if adapters else None
        return ReshardPlan(hf, train, engine, ranks_per_node, bucket_bytes, wire, table=table)
    except ConfigError as error:
        raise ConfigError(f"the weights cannot be synced to the engines: {error}") from None


def plan_for_layout(hf: HFConfig, config: Config, engine: EngineLayout, adapters: bool = False) -> ReshardPlan:
    """Build the plan from the actor's ranks to the engines', as placed by `placement`."""
    placement = placement_of(config)
    sides = () if placement.is_colocated else (placement.ranks_of("actor"), placement.ranks_of("rollout"))
    train_ranks, engine_ranks = sides or (None, None)
    return build_plan(hf, config, engine, train_ranks, engine_ranks, adapters)
