"""Which of SGLang's settings leave an engine's weights where the tables say they are, found by reading SGLang 0.5.23.

A setting that moves, swaps or repacks weights without changing a shape would have the push write them where they do not
belong: hashes agree, and the engine computes something else. So of the settings that concern weights only what is known
to be harmless is allowed, by name; a later SGLang's new ones are refused until somebody has read what they do. What an
engine says about itself when it has started (`rollout.loader`, "describe") is compared besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import ConfigError
from megarl.reshard.runners import PLACEMENTS, TABLES, carried
from megarl.rollout.server_args import fields

_ANY = object()

_FREE = frozenset(
    {
        "Device",
        "Schedule",
        "Memory",
        "Mm",
        "Observability",
        "Serving",
        "ExecComm",
        "ExecGraph",
        "ExecMamba",
        "ExecOverlap",
    }
)
"""SGLang's groups of settings that know nothing of weights."""

_ATTENTION = (
    "triton",
    "torch_native",
    "flex_attention",
    "fa3",
    "fa4",
    "flashinfer",
    "flashmla",
    "trtllm_mla",
    "trtllm_mha",
    "cutedsl_mla",
)
"""MLA's w_kc and w_vc, which SGLang computes of kv_b_proj, are computed anew after each push."""

_ALLOWED: dict[str, Any] = {
    "load_format": ("auto", "safetensors", "pt", "npcache", "fastsafetensors"),
    "model_loader_extra_config": _ANY,
    "model_impl": ("auto", "sglang"),
    "trust_remote_code": _ANY,
    "context_length": _ANY,
    "download_dir": _ANY,
    "kv_cache_dtype": ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
    "weight_loader_disable_mmap": _ANY,
    "weight_loader_prefetch_checkpoints": _ANY,
    "weight_loader_prefetch_num_threads": _ANY,
    "weight_loader_drop_cache_after_load": _ANY,
    "nccl_port": _ANY,
    "dist_timeout": _ANY,
    "load_balance_method": _ANY,
    "attn_dp_size": _ANY,
    "dp_size": _ANY,
    "enable_dp_attention": _ANY,
    "enable_dp_attention_local_control_broadcast": _ANY,
    "enable_dp_lm_head": _ANY,
    "enable_p2p_check": _ANY,
    "moe_dense_tp_size": _ANY,
    "moe_runner_backend": carried("moe_runner_backend"),
    "moe_a2a_backend": carried("moe_a2a_backend"),
    "speculative_moe_runner_backend": carried("moe_runner_backend"),
    "enable_fused_moe_sum_all_reduce": _ANY,
    "deepep_mode": _ANY,
    "deepep_config": _ANY,
    "deepep_dispatcher_output_dtype": ("auto", "bf16", "fp8"),
    "ep_dispatch_algorithm": ("static", "dynamic"),
    "expert_distribution_recorder_mode": _ANY,
    "expert_distribution_recorder_buffer_size": _ANY,
    "expert_balancedness_report_mode": _ANY,
    "disable_shared_experts_fusion": _ANY,
    "enforce_shared_experts_fusion": _ANY,
    "attention_backend": _ATTENTION,
    "prefill_attention_backend": _ATTENTION,
    "decode_attention_backend": _ATTENTION,
    "speculative_draft_attention_backend": _ATTENTION,
    "speculative_attention_mode": _ANY,
    "sampling_backend": _ANY,
    "grammar_backend": _ANY,
    "fp8_gemm_runner_backend": carried("fp8_gemm_runner_backend"),
    "bf16_gemm_backend": _ANY,
    "disable_flashinfer_autotune": _ANY,
    "flashinfer_autotune_skip_ops": _ANY,
    "flashinfer_mla_disable_ragged": _ANY,
    "triton_attention_reduce_in_fp32": _ANY,
    "triton_attention_num_kv_splits": _ANY,
    "triton_attention_split_tile_size": _ANY,
    "enable_fused_qk_norm_rope": _ANY,
    "enable_fp32_lm_head": _ANY,
    "enable_tf32_matmul": _ANY,
    "enable_weights_cpu_backup": _ANY,
    "enable_draft_weights_cpu_backup": _ANY,
    "enable_return_hidden_states": _ANY,
    "return_hidden_states_mode": _ANY,
    "enable_custom_logit_processor": _ANY,
    "disable_outlines_disk_cache": _ANY,
    "enable_deterministic_inference": _ANY,
}
"""Of the other groups: what may be set, besides to SGLang's own default."""

_WHY = {
    "init_expert_location": "experts must be where their numbers say; leave it out",
    "enable_eplb": "experts would move while the engine runs; leave it out",
    "ep_num_redundant_experts": "experts would move while the engine runs; leave it out",
    "pp_size": "weights can be pushed to engines without pipeline parallelism only; leave it out",
    "quantization": "an engine that quantises by itself what it is given cannot be pushed to; take an FP8 checkpoint, "
    "whose config.json has quantization_config",
    "cpu_offload_gb": "weights that are elsewhere cannot be pushed to; set rollout.tp higher instead",
    "delete_ckpt_after_loading": "it would delete model.path",
    "enable_lora": "adapters are merged before they are pushed; set lora.rank",
    "json_model_override_args": "the engine's model must be the trainer's; change config.json in model.path",
}
_NOT_DEFAULT = {"moe_runner_backend", "speculative_moe_runner_backend"}
"""SGLang's default of which is not one by name: its own choice on Blackwell swaps gate and up."""

ENVIRONMENT = {
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "0",  # the rows of gate and up in turn
    "SGLANG_SHARED_EXPERT_TP1": "0",  # shared experts on every rank
    "SGLANG_FORCE_FP8_MARLIN": "0",  # repacks FP8
    "SGLANG_OPT_HOPPER_BLOCK_FP8_BF16": "0",  # computes with a copy of the weights
    "SGLANG_ENABLE_EMBED_REPLICATION": "0",  # the embedding on every rank
}
"""Environment variables of SGLang's that concern weights, as an engine has to have them."""


def check(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of `rollout.sglang`, of those that `server_args.check` lets pass, that is not
    known to leave the weights where they are."""
    for name, value in settings.items():
        field, allowed = fields()[name], _ALLOWED.get(name)
        if field.group in _FREE or allowed is _ANY or (value == field.default and name not in _NOT_DEFAULT):
            continue
        if value is None and name in _NOT_DEFAULT:
            continue
        if allowed is not None and value in allowed:
            continue
        remedy = _WHY.get(name, f"take one of {', '.join(allowed)}" if allowed else "leave it out")
        known = TABLES.get(name.removeprefix("speculative_"), {}).get(str(value)) or PLACEMENTS.get(name)
        if known is not None and name not in _WHY:
            remedy = f"{known.why}; {remedy}"
        raise ConfigError(f"rollout.sglang.{name}={value} is not known to leave an engine's weights in place: {remedy}")


def safe_runner(settings: Mapping[str, Any], blackwell: bool) -> dict[str, str]:
    """What a GPU's engine computes with where `rollout.sglang` does not say. SGLang's own choice on Blackwell is, for
    experts, flashinfer_trtllm, for which gate and up are swapped, and for FP8 deep_gemm, which repacks the scales."""
    runner = "triton" if settings.get("moe_a2a_backend", "none") == "none" else "deep_gemm"
    return {"moe_runner_backend": runner} | ({"fp8_gemm_runner_backend": "triton"} if blackwell else {})
