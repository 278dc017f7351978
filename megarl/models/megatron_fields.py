"""Check `model.megatron` against Megatron's TransformerConfig, parsed from source to avoid importing Megatron."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, foreign_dataclasses
from megarl.models.activation_memory import RECOMPUTED_TENSORS
from megarl.models.family import NO_EXTRAS, Extras

CONFIG_KEYS = {
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
    "params_dtype": "model.dtype",
    "bf16": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "deterministic_mode": "train.deterministic",
    "mtp_num_layers": "train.mtp_loss_coef",
    "mtp_loss_scaling_factor": "train.mtp_loss_coef",
    "dsa_indexer_loss_coeff": "train.indexer_loss_coef",
    "hybrid_context_parallel": "parallel.dynamic_cp",
    "max_seqlen_per_dp_cp_rank": "train.max_tokens_per_gpu",
}
"""Fields that a key of MegaRL's sets."""

FORBIDDEN = {
    "fp16": "training in fp16 is not implemented",
    "sequence_parallel": "it is on exactly where parallel.tp > 1",
    "pipeline_model_parallel_layout": "give num_layers_in_first_pipeline_stage and ..._last_... instead",
    "account_for_embedding_in_pipeline_split": "give num_layers_in_first_pipeline_stage instead",
    "account_for_loss_in_pipeline_split": "give num_layers_in_last_pipeline_stage instead",
    "calculate_per_token_loss": "losses are sums over tokens",
    "variable_seq_lengths": "micro-batches differ in length",
    "window_size": "config.json determines which layers have windows",
    "window_attn_skip_freq": "config.json determines which layers have windows",
    "layernorm_zero_centered_gamma": "weights of norms are what they are in the checkpoint",
    "finalize_model_grads_func": "it is a function",
    "moe_router_force_load_balancing": "it sends tokens anywhere, for benchmarks",
    "moe_router_force_biased": "it sends tokens anywhere, for benchmarks",
    "transformer_impl": "Transformer Engine on GPUs, Megatron's local modules on CPUs",
    "use_mup": "it is for training from random weights",
    "mla_down_proj_fusion": "the weight tables have separate down projections",
    "moe_single_grouped_weight": "the weight tables have a weight per expert",
    "moe_single_grouped_bias": "the weight tables have a bias per expert",
    "moe_mlp_glu_interleave_size": "the weight tables have the order of gate and up that checkpoints have",
    "gtp_weight_remat_size": "the weight tables do not have this split of weights",
    "expert_gtp_weight_remat_size": "the weight tables do not have this split of weights",
    "tensor_parallel_num_weight_shards": "the weight tables do not have this split of weights",
}
"""Fields that cannot be set, and why."""

MODEL_FIELDS = frozenset(
    # sizes, norms and MLPs
    "num_layers hidden_size ffn_hidden_size normalization layernorm_epsilon gated_linear_unit activation_func "
    "activation_func_clamp_value add_bias_linear glu_linear_offset apply_residual_connection_post_layernorm "
    # attention
    "num_attention_heads num_query_groups kv_channels add_qkv_bias qk_layernorm qk_l2_norm softmax_scale softmax_type "
    "attention_output_gate multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim "
    "rope_type rotary_base rotary_percent rotary_interleaved rotary_scaling_factor original_max_position_embeddings "
    "beta_fast beta_slow mscale mscale_all_dim no_rope_freq mrope_section "
    # experts
    "num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "moe_latent_size moe_apply_probs_on_input moe_router_topk moe_router_pre_softmax moe_router_score_function "
    "moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk "
    "moe_router_topk_limited_devices "
    # layer types that no family here has
    "experimental_attention_variant heterogeneous_block_specs is_hybrid_model linear_attention_freq "
    "linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim "
    "dsa_indexer_head_dim dsa_indexer_n_heads dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_scoring_relu "
    "dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_skip_topk_offset "
    "dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_use_sparse_loss mamba_head_dim mamba_num_groups "
    "mamba_num_heads mamba_state_dim mtp_use_repeated_layer mtp_hybrid_override_pattern".split()
)
"""Fields that define what the model computes, which config.json decides. Others of a family may be overridden."""

DDP_FORBIDDEN = {
    "use_distributed_optimizer": "it is always on",
    "grad_reduce_in_fp32": "it is always on",
    "overlap_param_gather": "weights must be complete after a step, for the weight sync",
    "average_in_collective": "losses are sums over tokens",
    "use_megatron_fsdp": "set train.fsdp",
    "use_custom_fsdp": "set train.fsdp",
    "outer_dp_sharding_strategy": "train.fsdp shards over all data parallel ranks",
    "fsdp_all_gather_in_start_param_sync": "train.fsdp sets it",
    "megatron_fsdp_main_params_dtype": "train.fsdp sets it",
    "megatron_fsdp_main_grads_dtype": "all gradients are accumulated and reduced in fp32",
    "megatron_fsdp_grad_comm_dtype": "all gradients are accumulated and reduced in fp32",
    "data_parallel_sharding_strategy": "train.fsdp shards weights, gradients and states, and without it states alone",
    "param_name_patterns_for_fp32_local_accumulation": "all gradients are accumulated and reduced in fp32",
}
"""Fields of DistributedDataParallelConfig that cannot be set, and why."""

FP8_RECIPE = "tensorwise"  # default of `model.megatron.fp8`: current per-tensor scales, on Hopper and Blackwell
_NEVER_NEGATIVE = ("_coeff", "_rate", "_std", "_eps", "epsilon", "_factor")
_DDP = (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),)
_CLASSES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
)
_MLA_CLASSES = (*_CLASSES, ("transformer/transformer_config.py", "MLATransformerConfig"))


@functools.cache
def _parse_fields(classes: tuple[tuple[str, str], ...]) -> dict[str, foreign_dataclasses.Field]:
    """Return the fields of dataclasses by name; later classes override earlier ones.

    Raises ConfigError without Megatron.
    """
    spec = importlib.util.find_spec("megatron.core")  # finds the package without importing it
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("Megatron-Core is not installed; run `bash launch/install.sh`")
    fields: dict[str, foreign_dataclasses.Field] = {}
    for file, name in classes:
        source = Path(spec.submodule_search_locations[0], file).read_text()
        body = next(n.body for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
        fields |= foreign_dataclasses.parse_fields(body)
    return fields


def check(settings: Mapping[str, Any], mla: bool, extras: Extras = NO_EXTRAS) -> None:
    """Raise ConfigError for a key of `model.megatron` that Megatron does not have, that is reserved, or that conflicts
    with `extras`, the model's features beyond Megatron."""
    for name in settings:
        if name in CONFIG_KEYS:
            raise ConfigError(f"model.megatron.{name} has its own key: set {CONFIG_KEYS[name]}")
        if name in MODEL_FIELDS:
            raise ConfigError(f"model.megatron.{name} cannot be set: the model's config.json decides it; remove it")
    _check_fields("model.megatron", settings, _MLA_CLASSES if mla else _CLASSES, FORBIDDEN)
    _check_recompute(settings)
    if settings.get("fp8_recipe") == "delayed":  # Megatron's own default
        raise ConfigError(
            "model.megatron.fp8_recipe=delayed: Megatron 0.19.2 gives it override_linear_precision, which Transformer "
            f"Engine 2 does not accept; use {FP8_RECIPE}, blockwise (Hopper) or mxfp8 (Blackwell)"
        )
    if extras.has_own_router and settings.get("moe_router_fusion"):
        chosen = "rank groups" if extras.has_group_max_routing else "choose experts"
        raise ConfigError(f"model.megatron.moe_router_fusion: the fused router does not {chosen} as this model does")
    for name in ("apply_rope_fusion", "fused_single_qkv_rope"):
        if extras.rotary and extras.rotary.scale != 1 and settings.get(name):
            raise ConfigError(
                f"model.megatron.{name}: the fused kernel has no factor on cosines and sines, which is "
                f"{extras.rotary.scale:.6g} by this model's rope_type yarn; remove it"
            )
    if extras.has_sinks and settings.get("cp_comm_type", "a2a") != "a2a":
        raise ConfigError(
            "model.megatron.cp_comm_type: Transformer Engine computes attention with sinks only with a2a; remove it"
        )
    if extras.attention_cap and settings.get("attention_dropout"):
        raise ConfigError("model.megatron.attention_dropout is not implemented for attention with a soft cap")


def _check_recompute(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for combinations of recompute fields that Megatron would reject only after startup."""
    section, granularity = "model.megatron.", settings.get("recompute_granularity")
    for name in settings.get("recompute_modules") or ():
        if name not in RECOMPUTED_TENSORS:
            hint = foreign_dataclasses.did_you_mean(name, RECOMPUTED_TENSORS)
            raise ConfigError(f"{section}recompute_modules: {name} is not one of {', '.join(RECOMPUTED_TENSORS)}{hint}")
    present = [name for name in ("recompute_method", "recompute_num_layers") if settings.get(name) is not None]
    if granularity == "full" and len(present) < 2:
        raise ConfigError(f"{section}recompute_granularity=full needs recompute_method and recompute_num_layers, too")
    if granularity == "selective" and "recompute_num_layers" in present:
        raise ConfigError(f"{section}recompute_num_layers is for recompute_granularity=full; remove it")
    if granularity == "full" and settings["recompute_num_layers"] < 1:
        raise ConfigError(f"{section}recompute_num_layers must be at least 1, not {settings['recompute_num_layers']}")


def check_ddp(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key of `train.ddp` that Megatron does not have, with a suggestion, or is reserved."""
    _check_fields("train.ddp", settings, _DDP, DDP_FORBIDDEN)


def _check_fields(
    section: str, settings: Mapping[str, Any], classes: tuple[tuple[str, str], ...], forbidden: Mapping[str, str]
) -> None:
    """Raise ConfigError for a key that is no field or forbidden, and for a value of the wrong type or out of range."""
    fields = _parse_fields(classes)
    for name, value in settings.items():
        key = f"{section}.{name}"
        if name in forbidden:
            raise ConfigError(f"{key} cannot be set: {forbidden[name]}")
        if name not in fields:
            suggestion = foreign_dataclasses.did_you_mean(name, fields)
            raise ConfigError(f"{key} is not a field of Megatron's {classes[-1][1]}{suggestion}")
        foreign_dataclasses.check_field_value(key, value, fields[name])
        numbers = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int | float)]
        if name.endswith("dropout") and any(not 0 <= number < 1 for number in numbers):
            raise ConfigError(f"{key} is a share: it must be at least 0 and below 1, not {value}")
        if name.endswith(_NEVER_NEGATIVE) and any(number < 0 for number in numbers):
            raise ConfigError(f"{key} must not be negative, but is {value}")
        if name == "bucket_size" and value == 0:
            raise ConfigError(f"{key} must be above 0, or null for one bucket, not 0")
