"""The layouts, and the plan of a push, that a configuration describes."""

from __future__ import annotations

from megarl.config import Config, ConfigError
from megarl.models.fp8 import is_fp8
from megarl.models.layout import HFConfig
from megarl.models.stages import stage_layers
from megarl.reshard.flows import Wire
from megarl.reshard.layout import EngineLayout, TrainLayout
from megarl.reshard.planner import Plan

WIRES: dict[str, Wire] = {"bfloat16": "bf16", "float32": "fp32"}


def train_layout(hf: HFConfig, config: Config) -> TrainLayout:
    """Of the ranks that a configuration describes."""
    parallel = config.parallel
    stages = stage_layers(int(hf["num_hidden_layers"]), parallel.pp, config.model.megatron, parallel.vpp)
    return TrainLayout(parallel.world_size, parallel.tp, parallel.ep, tuple(stages), parallel.etp, parallel.cp)


def engine_layout(config: Config) -> EngineLayout:
    """Of the engines that a configuration describes. Raises ConfigError for what the reshard cannot serve."""
    settings = config.rollout.sglang
    if settings.get("pp_size", 1) != 1:
        raise ConfigError("rollout.sglang.pp_size: weights can be pushed to engines without pipeline parallelism only")
    if settings.get("ep_num_redundant_experts", 0) or settings.get("enable_eplb"):
        raise ConfigError("rollout.sglang: redundant experts move while the engine runs; turn enable_eplb off")
    if settings.get("quantization"):
        raise ConfigError(
            f"rollout.sglang.quantization={settings['quantization']}: an engine that quantises what it is given by "
            "itself cannot be pushed to; take an FP8 checkpoint, whose config.json has quantization_config"
        )
    attention = int(settings.get("attn_dp_size") or settings.get("dp_size") or 1)
    if attention > 1 and not (settings.get("attn_dp_size") or settings.get("enable_dp_attention")):
        raise ConfigError("rollout.sglang.dp_size: more engines come by themselves; set rollout.tp, or attn_dp_size")
    tp = config.rollout.tp
    return EngineLayout(
        tp,
        config.rollout.ep,
        attention,
        mlp_tp=int(settings.get("moe_dense_tp_size") or 0),
        head_tp=tp // attention if settings.get("enable_dp_lm_head") else 0,
        draft=bool(config.rollout.draft_tokens and config.train.mtp),  # else it stays what it was loaded as
    )


def push_plan(hf: HFConfig, config: Config, engine: EngineLayout) -> Plan:
    """Raises ConfigError where the weights cannot be pushed."""
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
        return Plan(hf, train_layout(hf, config), engine, here, bucket, wire)
    except ConfigError as error:
        raise ConfigError(f"the weights cannot be pushed to the engines: {error}") from None
