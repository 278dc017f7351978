"""Layouts and weight-sync plans for a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.config import Config, ConfigError, server_args
from megarl.models.fp8 import is_fp8
from megarl.models.int4 import is_int4
from megarl.models.layout_algebra import HFConfig
from megarl.models.pipeline_stages import stage_layers
from megarl.parallel.placement import placement_of
from megarl.reshard.plan import engine_settings
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, Wire
from megarl.reshard.plan.planner import ReshardPlan

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
        wire = quantised
    if wire == "int4":
        engine_settings.check_int4(config.rollout.sglang)
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
