"""SGLang settings that keep an engine's weights where the layout tables say they are, from reading SGLang 0.5.23.

A setting that moves, swaps or repacks weights without changing a shape would make the weight sync write to wrong
places: hashes agree, and the engine computes something else. Settings that concern weights are therefore allowed by
name only, and those of a later SGLang are refused until somebody has read what they do. In addition, a started engine
describes its layers, and the description is compared (`find_layout_oddities` in `engine/weight_loader.py`); if they
differ, the run ends before training.

The tables list every way of SGLang 0.5.23 to compute experts, quantise, dispatch tokens and place experts: supported by
the layout, or refused by name with a reason. A test fails for every choice in SGLang's source that has no entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megarl.config import ConfigError
from megarl.config.server_args import load_fields


class Verdict(NamedTuple):
    """Verdict on whether weights stay where the tables of `models/` say, per checkpoint dtype, with the reason.
    "bf16" includes FP32; "fp8" is e4m3 with a scale per block of 128 x 128."""

    bf16: bool
    fp8: bool
    why: str


def _supported(why: str) -> Verdict:
    return Verdict(True, True, why)


def _refused(why: str) -> Verdict:
    return Verdict(False, False, why)


_UNREAD = "nobody has read what it does to weights"
_MXFP4 = "for MXFP4 checkpoints, which are not implemented"
_LORA = "for adapters of its own, which are merged before a push here"

RUNNERS: dict[str, Verdict] = {
    "triton": _supported("w13 is [gate; up], w2 as in the checkpoint, scales FP32"),
    "deep_gemm": _supported("as triton; with FP8 on Blackwell it repacks the scales (ue8m0), which is refused there"),
    "auto": _refused("on Blackwell it is one that swaps gate and up; without the setting MegaRL names triton"),
    "triton_kernel": _refused("has experts transposed"),
    "flashinfer_trtllm": _refused("has [up; gate], padded to 128 and packed into blocks"),
    "experimental_sgl_trtllm": _refused("shares the blocks of flashinfer_trtllm"),
    "flashinfer_trtllm_routed": _refused("shares the blocks of flashinfer_trtllm"),
    "flashinfer_cutlass": _refused("has [up; gate]"),
    "flashinfer_mxfp4": _refused(_MXFP4),
    "flashinfer_cutedsl": _refused(_UNREAD),
    "flashinfer_megamoe": _refused("repacks experts"),
    "megamoe": _refused("repacks experts"),
    "cutlass": _refused(_UNREAD),
    "aiter": _refused("shuffles experts in tiles of 16 x 16"),
    "marlin": _refused("repacks experts"),
    "humming": _refused("repacks experts"),
    "experimental_sgl_marlin": _refused(_UNREAD),
    "lora_cutedsl": _refused(_LORA),
    "lora_triton": _refused(_LORA),
    "lora_marlin": _refused(_LORA),
    "hpc_ops": _refused("computes with a copy of the scales"),
    "intel_xpu": _refused("for Intel's GPUs"),
}
"""Choices of moe_runner_backend and speculative_moe_runner_backend."""

A2A: dict[str, Verdict] = {
    "none": _supported("experts by ep, the shared ones cut by tp"),
    "deepep": _supported("the shared experts whole on each rank; needs rollout.ep = rollout.tp"),
    "megamoe": _refused("repacks experts"),
    "flashinfer_megamoe": _refused("repacks experts"),
    "ascend_fuseep": _refused("for Ascend"),
    "ascend_tp": _refused("for Ascend"),
    "mori": _refused(_UNREAD),
    "mooncake": _refused(_UNREAD),
    "nixl": _refused(_UNREAD),
    "flashinfer": _refused(_UNREAD),
    "deepep_v2": _refused(_UNREAD),
    "pplx": _refused(_UNREAD),
    "customized": _refused("it is anybody's code"),
}
"""Choices of moe_a2a_backend."""

_ITSELF = "the engine quantises by itself, at its start, what it is given in another type afterwards"
_INTEGERS = "matrices as packed integers, which training has no values for"
_FP4 = "FP4, which a push does not make"
_OTHERS = "for other kinds of machines"

QUANTISATIONS: dict[str, Verdict] = {
    "fp8": _refused(f"{_ITSELF}; a checkpoint whose config.json has quantization_config in blocks of 128 is carried"),
    "mxfp8": _refused(f"{_ITSELF}; scales of 32 are not implemented"),
    "w8a8_fp8": _refused("a scale for each row, which a push does not make"),
    "unquant": _refused("undoes what the checkpoint says of itself"),
    "auto-round": _refused(_INTEGERS),
    "auto-round-int8": _refused(_INTEGERS),
    "awq": _refused(_INTEGERS),
    "awq_marlin": _refused(_INTEGERS),
    "bitsandbytes": _refused(_INTEGERS),
    "compressed-tensors": _refused("of many kinds, of which none is implemented"),
    "gguf": _refused(_INTEGERS),
    "gptq": _refused(_INTEGERS),
    "gptq_marlin": _refused(_INTEGERS),
    "humming": _refused("repacks weights"),
    "mlx_q4": _refused(_OTHERS),
    "mlx_q8": _refused(_OTHERS),
    "modelopt": _refused("of many kinds, of which none is implemented"),
    "modelopt_fp4": _refused(_FP4),
    "modelopt_fp8": _refused("a scale for each tensor, which a push does not make"),
    "modelopt_mixed": _refused(_FP4),
    "modelslim": _refused(_OTHERS),
    "moe_wna16": _refused(_INTEGERS),
    "mxfp4": _refused(_FP4),
    "mxfp_w4a8": _refused(_OTHERS),
    "nvfp4_online": _refused(_FP4),
    "petit_nvfp4": _refused(_FP4),
    "quark": _refused(_OTHERS),
    "quark_int4fp8_moe": _refused(_OTHERS),
    "quark_mxfp4": _refused(_OTHERS),
    "w4afp8": _refused(_INTEGERS),
    "w8a8_int8": _refused(_INTEGERS),
}
"""Choices of quantization as a setting. `models/fp8.py` reads the checkpoint's own quantization_config."""

FP8_GEMM: dict[str, Verdict] = {
    "auto": _supported("as deep_gemm; on Blackwell MegaRL names triton"),
    "triton": _supported("matrices and FP32 scales as in the checkpoint"),
    "deep_gemm": _supported("as triton; on Blackwell it repacks the scales (ue8m0), which is refused there"),
    "flashinfer_trtllm": _refused(_UNREAD),
    "flashinfer_cutlass": _refused(_UNREAD),
    "flashinfer_deepgemm": _refused(_UNREAD),
    "flashinfer_cutedsl": _refused(_UNREAD),
    "cutlass": _refused(_UNREAD),
    "aiter": _refused("shuffles matrices"),
}
"""Choices of fp8_gemm_runner_backend."""

PLACEMENTS: dict[str, Verdict] = {
    "init_expert_location": _refused("experts must be where their numbers say; trivial, the default, is that"),
    "ep_num_redundant_experts": _refused("copies of experts, which EPLB moves while the engine runs"),
    "enable_eplb": _refused("moves experts while the engine runs"),
    "elastic_ep_backend": _refused("places experts anew when a rank is gone"),
    "moe_dp_size": _refused("another grid of experts than rollout.ep and rollout.tp"),
    "enable_waterfill": _refused("has the shared expert among the routed ones, on whichever rank has least to do"),
    "enable_paged_experts": _refused(_UNREAD),
}
"""Settings that determine where experts are."""

TABLES: dict[str, dict[str, Verdict]] = {
    "moe_runner_backend": RUNNERS,
    "moe_a2a_backend": A2A,
    "quantization": QUANTISATIONS,
    "fp8_gemm_runner_backend": FP8_GEMM,
}
"""SGLang setting -> verdict on each of its choices."""


def supported_choices(setting: str) -> tuple[str, ...]:
    """Return the choices of a setting that leave weights in place."""
    return tuple(name for name, verdict in TABLES[setting].items() if verdict.bf16)


def check_blackwell(settings: Mapping[str, Any], fp8: bool) -> None:
    """Raise ConfigError for a setting that repacks the scales of an FP8 checkpoint on Blackwell. settings: as passed
    to the engine."""
    if not fp8:
        return
    for name in ("moe_runner_backend", "speculative_moe_runner_backend", "fp8_gemm_runner_backend"):
        if settings.get(name) == "deep_gemm":
            reason = ""
            if name == "moe_runner_backend" and settings.get("moe_a2a_backend", "none") != "none":
                reason = f", which rollout.sglang.moe_a2a_backend={settings['moe_a2a_backend']} needs"
            raise ConfigError(
                f"rollout.sglang.{name}=deep_gemm{reason}: with an FP8 checkpoint it repacks the scales on this GPU "
                "(Blackwell), so weights cannot be pushed; leave both out, or convert the weights to bfloat16"
            )


def as_markdown() -> str:
    """Return the tables for `README.md`; a test compares them."""
    lines = ["| setting | choice | BF16, FP32 | FP8 in blocks | why |", "|---|---|---|---|---|"]
    words = {True: "carried", False: "refused"}
    for setting, table in TABLES.items():
        by_why: dict[Verdict, list[str]] = {}
        for name, verdict in table.items():
            by_why.setdefault(verdict, []).append(name)
        lines += [
            f"| {setting} | {', '.join(names)} | {words[verdict.bf16]} | {words[verdict.fp8]} | {verdict.why} |"
            for verdict, names in by_why.items()
        ]
    lines += [f"| {name} | any | refused | refused | {verdict.why} |" for name, verdict in PLACEMENTS.items()]
    return "\n".join(lines)


_ANY = object()

_UNRESTRICTED_GROUPS = frozenset(
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
"""SGLang's groups of settings that do not concern weights."""

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
"""Allowed attention backends. SGLang recomputes MLA's w_kc and w_vc from kv_b_proj after each weight sync."""

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
    "moe_runner_backend": supported_choices("moe_runner_backend"),
    "moe_a2a_backend": supported_choices("moe_a2a_backend"),
    "speculative_moe_runner_backend": supported_choices("moe_runner_backend"),
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
    "fp8_gemm_runner_backend": supported_choices("fp8_gemm_runner_backend"),
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
"""Allowed values of settings in the other groups, in addition to SGLang's default."""

_REMEDIES = {
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
_NO_SAFE_DEFAULT = {"moe_runner_backend", "speculative_moe_runner_backend"}
"""Settings without a safe default: SGLang's own choice on Blackwell swaps gate and up."""

ENVIRONMENT = {
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "0",  # would interleave the rows of gate and up
    "SGLANG_SHARED_EXPERT_TP1": "0",  # would put whole shared experts on every rank
    "SGLANG_FORCE_FP8_MARLIN": "0",  # would repack FP8
    "SGLANG_OPT_HOPPER_BLOCK_FP8_BF16": "0",  # would compute with a copy of the weights
    "SGLANG_ENABLE_EMBED_REPLICATION": "0",  # would put the whole embedding on every rank
}
"""SGLang's environment variables that concern weights, as every engine must have them."""


def check(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of `rollout.sglang` that is not known to leave the weights in place, among
    those that `server_args.check` allows."""
    for name, value in settings.items():
        field, allowed = load_fields()[name], _ALLOWED.get(name)
        if (
            field.group in _UNRESTRICTED_GROUPS
            or allowed is _ANY
            or (value == field.default and name not in _NO_SAFE_DEFAULT)
        ):
            continue
        if value is None and name in _NO_SAFE_DEFAULT:
            continue
        if allowed is not None and value in allowed:
            continue
        remedy = _REMEDIES.get(name, f"take one of {', '.join(allowed)}" if allowed else "leave it out")
        verdict = TABLES.get(name.removeprefix("speculative_"), {}).get(str(value)) or PLACEMENTS.get(name)
        if verdict is not None and name not in _REMEDIES:
            remedy = f"{verdict.why}; {remedy}"
        raise ConfigError(f"rollout.sglang.{name}={value} is not known to leave an engine's weights in place: {remedy}")


def choose_runner(settings: Mapping[str, Any], blackwell: bool) -> dict[str, str]:
    """Return the backends for a GPU engine where `rollout.sglang` does not set them.

    On Blackwell, SGLang's own choice would be flashinfer_trtllm for experts, which swaps gate and up, and deep_gemm for
    FP8, which repacks the scales.
    """
    runner = "triton" if settings.get("moe_a2a_backend", "none") == "none" else "deep_gemm"
    return {"moe_runner_backend": runner} | ({"fp8_gemm_runner_backend": "triton"} if blackwell else {})
