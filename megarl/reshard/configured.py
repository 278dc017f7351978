"""The layouts, and the plan of a push, that a configuration describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.config import Config, ConfigError
from megarl.models.cuts import HFConfig
from megarl.models.fp8 import is_fp8
from megarl.models.stages import stage_layers
from megarl.parallel.placement import placement_of
from megarl.reshard import engine_settings
from megarl.reshard.flows import Wire
from megarl.reshard.layout import EngineLayout, TrainLayout
from megarl.reshard.planner import Plan
from megarl.rollout import server_args

WIRES: dict[str, Wire] = {"bfloat16": "bf16", "float32": "fp32"}


def train_layout(hf: HFConfig, config: Config, ranks: Sequence[int] | None = None) -> TrainLayout:
    """Of the ranks that a configuration describes. ranks: the job's numbers of them; where not given, all of them."""
    parallel = config.parallel
    stages = stage_layers(int(hf["num_hidden_layers"]), parallel.pp, config.model.megatron, parallel.vpp)
    world, chosen = (parallel.world_size, ()) if ranks is None else (len(ranks), tuple(ranks))
    return TrainLayout(world, parallel.tp, parallel.ep, tuple(stages), parallel.etp, parallel.cp, chosen)


def engine_layout(config: Config) -> EngineLayout:
    """Of the engines that a configuration describes. Raises ConfigError for what the reshard cannot serve."""
    settings, tp = config.rollout.sglang, config.rollout.tp
    server_args.check(settings)
    engine_settings.check(settings)
    attention = int(settings.get("attn_dp_size") or settings.get("dp_size") or 1)
    if attention > 1 and not (settings.get("attn_dp_size") or settings.get("enable_dp_attention")):
        raise ConfigError("rollout.sglang.dp_size: more engines come by themselves; set rollout.tp, or attn_dp_size")
    if settings.get("enable_dp_lm_head") and attention == 1:
        raise ConfigError("rollout.sglang.enable_dp_lm_head needs replicas of the attention: set attn_dp_size, too")
    dense = settings.get("moe_dense_tp_size")
    if dense not in (None, 1, tp):
        raise ConfigError(f"rollout.sglang.moe_dense_tp_size={dense}: SGLang knows 1 and rollout.tp={tp} only")
    sends_tokens = settings.get("moe_a2a_backend", "none") != "none"
    if sends_tokens:
        _check_a2a(config)
    return EngineLayout(
        tp,
        config.rollout.ep,
        attention,
        mlp_tp=int(dense or 0),
        shared_tp=1 if sends_tokens else 0,  # SGLang has them whole on each rank then
        head_tp=tp // attention if settings.get("enable_dp_lm_head") else 0,
        draft=bool(config.rollout.draft_tokens and config.train.mtp),  # else it stays what it was loaded as
    )


def _check_a2a(config: Config) -> None:
    """What goes with experts to which tokens are sent."""
    settings, rollout = config.rollout.sglang, config.rollout
    where = f"rollout.sglang.moe_a2a_backend={settings['moe_a2a_backend']}"
    if rollout.ep != rollout.tp:
        raise ConfigError(
            f"{where} divides the experts among all ranks of an engine: set rollout.ep to rollout.tp={rollout.tp}"
        )
    if rollout.draft_tokens:
        raise ConfigError(
            f"{where} with rollout.draft_tokens={rollout.draft_tokens}: how a draft model has its shared experts "
            "then nobody has looked; set one of them only"
        )
    if settings.get("enforce_shared_experts_fusion"):
        raise ConfigError(f"{where} with enforce_shared_experts_fusion: never tried; leave the second out")


def push_plan(
    hf: HFConfig,
    config: Config,
    engine: EngineLayout,
    train_ranks: Sequence[int] | None = None,
    engine_ranks: Sequence[int] | None = None,
) -> Plan:
    """train_ranks, engine_ranks: the job's numbers of the ranks of the trainer, in the order of its layout, and of the
    engines, one behind the other; all ranks of the job where not given. Raises ConfigError where the weights cannot be
    pushed."""
    world = config.parallel.world_size
    for whose, ranks in (("trainer", train_ranks), ("engines", engine_ranks)):
        if ranks is not None and not all(0 <= rank < world for rank in ranks):
            odd = next(rank for rank in ranks if not 0 <= rank < world)
            raise ConfigError(f"the ranks of the {whose} name rank {odd}: the job has ranks 0 to {world - 1}")
        if ranks is not None and not ranks:
            raise ConfigError(f"the {whose}'s ranks: none are given; name some of the job's {world}")
    wire = WIRES.get(config.model.dtype)
    if wire is None:
        raise ConfigError(f"model.dtype={config.model.dtype}: weights can be pushed in {' or '.join(WIRES)}")
    if is_fp8(hf):
        if wire != "bf16":
            raise ConfigError(
                f"model.dtype={config.model.dtype}: the engine of an FP8 checkpoint has what is not FP8 in bfloat16; "
                "set model.dtype=bfloat16"
            )
        wire = "fp8"
    here, bucket = config.parallel.ranks_per_node, config.rollout.push_bucket_mb << 20
    try:
        train = train_layout(hf, config, train_ranks)
        if train_ranks is not None or engine_ranks is not None:
            engine = replace(engine, ranks=tuple(range(world) if engine_ranks is None else engine_ranks))
        return Plan(hf, train, engine, here, bucket, wire)
    except ConfigError as error:
        raise ConfigError(f"the weights cannot be pushed to the engines: {error}") from None


def planned_push(hf: HFConfig, config: Config) -> Plan:
    """Of the push from the actor's ranks to the engines', wherever `placement` has them."""
    placement = placement_of(config)
    sides = () if placement.colocated else (placement.of("actor"), placement.of("rollout"))
    return push_plan(hf, config, engine_layout(config), *sides)
