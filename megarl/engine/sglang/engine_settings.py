"""Where SGLang has which weights, and settings with which they stay there, from reading SGLang 0.5.23.

A setting that moves, swaps or repacks weights without changing a shape would make weight syncs write to wrong places
while all hashes agree. So settings that concern weights are allowed by name only, and unread ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megarl.config import Config, ConfigError
from megarl.engine.sglang import server_args
from megarl.engine.sglang.server_args import load_fields
from megarl.models.family import HFConfig
from megarl.models.int4 import is_int4
from megarl.models.registry import family_of
from megarl.reshard.plan.expert_placement import initial_placement
from megarl.reshard.plan.layout import EngineLayout


class Verdict(NamedTuple):
    """Whether an engine with this choice keeps weights where the tables of `models/` say, in BF16, in FP32 and in FP8
    with a scale per block of 128 x 128; and why."""

    is_supported: bool
    why: str


def _verdicts(supported: Mapping[str, str], refused: Mapping[str, str]) -> dict[str, Verdict]:
    """Return the verdict on each choice, from two tables of choices, separated by spaces, with a reason."""
    tables = (True, supported), (False, refused)
    return {name: Verdict(ok, why) for ok, table in tables for names, why in table.items() for name in names.split()}


_UNREAD = "its effect on weights has not been reviewed"
_INTEGERS = "matrices as packed integers, which training has no values for"
_QUANTISED = "the engine quantises at its start; synced weights have another type"

TABLES: dict[str, dict[str, Verdict]] = {
    "moe_runner_backend": _verdicts(
        {
            "triton": "w13 is [gate; up], w2 as in the checkpoint, scales FP32",
            "deep_gemm": "as triton; with FP8 on Blackwell it repacks the scales (ue8m0), which is refused there",
        },
        {
            "auto": "on Blackwell it is one that swaps gate and up; without the setting MegaRL names triton",
            "triton_kernel": "has experts transposed",
            "flashinfer_trtllm": "has [up; gate], padded to 128 and packed into blocks",
            "experimental_sgl_trtllm flashinfer_trtllm_routed": "shares the blocks of flashinfer_trtllm",
            "flashinfer_cutlass": "has [up; gate]",
            "flashinfer_mxfp4": "for weights in MXFP4, which a weight sync does not produce",
            "flashinfer_cutedsl cutlass experimental_sgl_marlin": _UNREAD,
            "flashinfer_megamoe megamoe marlin humming": "repacks experts",
            "aiter": "shuffles experts in tiles of 16 x 16",
            "lora_cutedsl lora_triton lora_marlin": "for adapters in the engine; MegaRL merges adapters before a "
            "weight sync",
            "hpc_ops": "computes with a copy of the scales",
            "intel_xpu": "for Intel's GPUs",
        },
    ),
    "moe_a2a_backend": _verdicts(
        {
            "none": "experts by ep, the shared ones cut by tp",
            "deepep": "the shared experts whole on each rank; needs rollout.ep = rollout.tp",
        },
        {
            "megamoe flashinfer_megamoe": "repacks experts",
            "ascend_fuseep ascend_tp": "for Ascend",
            "mori mooncake nixl flashinfer deepep_v2 pplx": _UNREAD,
            "customized": "it runs arbitrary code",
        },
    ),
    # As a setting; `models/fp8.py` reads the checkpoint's own quantization_config.
    "quantization": _verdicts(
        {},
        {
            "fp8": f"{_QUANTISED}; a checkpoint whose config.json has quantization_config in blocks of 128 is "
            "supported",
            "mxfp8": f"{_QUANTISED}; scales of 32 are not implemented",
            "w8a8_fp8": "a scale for each row, which a weight sync does not produce",
            "unquant": "overrides what the checkpoint declares",
            "auto-round auto-round-int8 awq awq_marlin bitsandbytes gguf": _INTEGERS,
            "gptq gptq_marlin moe_wna16 w4afp8 w8a8_int8": _INTEGERS,
            "compressed-tensors": "overrides what the checkpoint declares; one whose config.json has "
            "quantization_config with INT4 experts is supported",
            "modelopt": "of many kinds, none of which is implemented",
            "humming": "repacks weights",
            "mlx_q4 mlx_q8 modelslim mxfp_w4a8 quark quark_int4fp8_moe quark_mxfp4": "for other hardware",
            "modelopt_fp4 modelopt_mixed mxfp4 nvfp4_online petit_nvfp4": "FP4, which a weight sync does not produce",
            "modelopt_fp8": "a scale for each tensor, which a weight sync does not produce",
        },
    ),
    "fp8_gemm_runner_backend": _verdicts(
        {
            "auto": "as deep_gemm; on Blackwell MegaRL names triton",
            "triton": "matrices and FP32 scales as in the checkpoint",
            "deep_gemm": "as triton; on Blackwell it repacks the scales (ue8m0), which is refused there",
        },
        {
            "flashinfer_trtllm flashinfer_cutlass flashinfer_deepgemm flashinfer_cutedsl cutlass": _UNREAD,
            "aiter": "shuffles matrices",
        },
    ),
}
"""SGLang setting -> verdict on each of its choices. speculative_moe_runner_backend has those of moe_runner_backend."""

PLACEMENTS = {
    "init_expert_location": "experts must be at their index; trivial, the default, ensures that",
    "ep_num_redundant_experts": "copies of experts, whose places MegaRL chooses (rollout.num_redundant_experts)",
    "enable_eplb": "moves experts while the engine runs; weight syncs do so instead (rollout.rebalance_experts_every)",
    "elastic_ep_backend": "relocates experts when a rank fails",
    "moe_dp_size": "another grid of experts than rollout.ep and rollout.tp",
    "enable_waterfill": "has the shared expert among the routed ones, on whichever rank has least to do",
    "enable_paged_experts": _UNREAD,
}
"""Settings that determine where experts are, with the reason why they are refused."""


def supported_choices(setting: str) -> tuple[str, ...]:
    """Return the choices of a setting that leave weights in place."""
    return tuple(name for name, verdict in TABLES[setting].items() if verdict.is_supported)


def check_blackwell(settings: Mapping[str, Any], fp8: bool) -> None:
    """Raise ConfigError for a setting of an engine that repacks the scales of an FP8 checkpoint on Blackwell."""
    a2a = settings.get("moe_a2a_backend", "none")
    for name in ("moe_runner_backend", "speculative_moe_runner_backend", "fp8_gemm_runner_backend"):
        if fp8 and settings.get(name) == "deep_gemm":
            needs_it = name == "moe_runner_backend" and a2a != "none"
            reason = f", which rollout.sglang.moe_a2a_backend={a2a} needs" if needs_it else ""
            raise ConfigError(
                f"rollout.sglang.{name}=deep_gemm{reason}: with an FP8 checkpoint it repacks the scales on this GPU "
                f"(Blackwell), so weights cannot be synced; remove both, or convert the weights to bfloat16"
            )


def check_int4(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting with which an engine has INT4 experts elsewhere than the weight sync writes.

    SGLang's Triton runner keeps them as bytes of two codes, [experts, rows, columns / 2], with a scale for each group,
    [experts, rows, columns / 32]. Its default, Marlin, repacks both in tiles of 16 x 64 at its start.
    """
    backend, a2a = settings.get("moe_runner_backend", "triton"), settings.get("moe_a2a_backend", "none")
    if a2a != "none":
        raise ConfigError(
            f"rollout.sglang.moe_a2a_backend={a2a}: with an INT4 checkpoint its experts need deep_gemm, which has no "
            "INT4; remove it"
        )
    if backend != "triton":
        raise ConfigError(
            f"rollout.sglang.moe_runner_backend={backend}: for an INT4 checkpoint SGLang then takes Marlin, which "
            "repacks experts; use triton"
        )


_ANY = object()

_UNRESTRICTED_GROUPS = frozenset(
    "Device Schedule Memory Mm Observability Serving ExecComm ExecGraph ExecMamba ExecOverlap".split()
)
"""SGLang's groups of settings that do not concern weights."""

_ATTENTION = tuple(
    "triton torch_native flex_attention fa3 fa4 flashinfer flashmla trtllm_mla trtllm_mha cutedsl_mla".split()
)
"""Allowed attention backends. SGLang recomputes MLA's w_kc and w_vc from kv_b_proj after each weight sync."""

_ALLOWED: dict[str, Any] = {
    **dict.fromkeys(
        """
        model_loader_extra_config trust_remote_code context_length download_dir
        weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
        weight_loader_drop_cache_after_load nccl_port dist_timeout load_balance_method
        attn_dp_size dp_size enable_dp_attention enable_dp_attention_local_control_broadcast enable_dp_lm_head
        enable_p2p_check moe_dense_tp_size enable_fused_moe_sum_all_reduce deepep_mode deepep_config
        expert_distribution_recorder_mode expert_distribution_recorder_buffer_size expert_balancedness_report_mode
        disable_shared_experts_fusion enforce_shared_experts_fusion speculative_attention_mode
        sampling_backend grammar_backend bf16_gemm_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops
        flashinfer_mla_disable_ragged triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size enable_fused_qk_norm_rope enable_fp32_lm_head enable_tf32_matmul
        enable_weights_cpu_backup enable_draft_weights_cpu_backup enable_return_hidden_states
        return_hidden_states_mode enable_custom_logit_processor disable_outlines_disk_cache
        enable_deterministic_inference
        """.split(),
        _ANY,
    ),
    "load_format": ("auto", "safetensors", "pt", "npcache", "fastsafetensors"),
    "model_impl": ("auto", "sglang"),
    "kv_cache_dtype": ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
    "moe_runner_backend": supported_choices("moe_runner_backend"),
    "moe_a2a_backend": supported_choices("moe_a2a_backend"),
    "speculative_moe_runner_backend": supported_choices("moe_runner_backend"),
    "deepep_dispatcher_output_dtype": ("auto", "bf16", "fp8"),
    "ep_dispatch_algorithm": ("static", "dynamic"),
    "attention_backend": _ATTENTION,
    "prefill_attention_backend": _ATTENTION,
    "decode_attention_backend": _ATTENTION,
    "speculative_draft_attention_backend": _ATTENTION,
    "fp8_gemm_runner_backend": supported_choices("fp8_gemm_runner_backend"),
}
"""Allowed values of settings in the other groups, in addition to SGLang's default."""

_REMEDIES = {
    "init_expert_location": "experts must be at their index; remove it",
    "enable_eplb": "experts would move while the engine runs; set rollout.rebalance_experts_every instead",
    "ep_num_redundant_experts": "set rollout.num_redundant_experts instead",
    "pp_size": "weights can be synced only to engines without pipeline parallelism; remove it",
    "quantization": "weights cannot be synced to an engine that quantises them itself; use an FP8 checkpoint, "
    "whose config.json has quantization_config",
    "cpu_offload_gb": "offloaded weights cannot be synced; set rollout.tp higher instead",
    "delete_ckpt_after_loading": "it would delete model.path",
    "disaggregation_mode": "each response would come from two engines, of which a client knows one; remove it",
    "enable_lora": "adapters are merged before a weight sync; set lora.rank",
    "json_model_override_args": "the engine's model must be the trainer's; change config.json in model.path",
}
_NO_SAFE_DEFAULT = {"moe_runner_backend", "speculative_moe_runner_backend"}
"""Settings without a safe default: SGLang's own choice on Blackwell swaps gate and up."""

ENVIRONMENT = {
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "0",  # would interleave the rows of gate and up
    "SGLANG_SHARED_EXPERT_TP1": "0",  # would put whole shared experts on every rank
    "SGLANG_FORCE_FP8_MARLIN": "0",  # would repack FP8
    "SGLANG_OPT_HOPPER_BLOCK_FP8_BF16": "0",  # would compute with a copy of the weights
    "SGLANG_DISABLE_DSA_INDEXER_FUSION": "1",  # would join two weights of GLM-5's indexer
    "SGLANG_ENABLE_EMBED_REPLICATION": "0",  # would put the whole embedding on every rank
}
"""SGLang's environment variables that concern weights, as every engine must have them."""


def check(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of `rollout.sglang` that is not known to leave the weights in place."""
    for name, value in settings.items():
        field, allowed = load_fields()[name], _ALLOWED.get(name)
        if field.group in _UNRESTRICTED_GROUPS or allowed is _ANY or (allowed is not None and value in allowed):
            continue
        if (value is None) if name in _NO_SAFE_DEFAULT else (value == field.default):
            continue
        remedy = _REMEDIES.get(name, f"use one of {', '.join(allowed)}" if allowed else "remove it")
        verdict = TABLES.get(name.removeprefix("speculative_"), {}).get(str(value))
        if name not in _REMEDIES and (why := verdict.why if verdict else PLACEMENTS.get(name)):
            remedy = f"{why}; {remedy}"
        raise ConfigError(f"rollout.sglang.{name}={value} may change an engine's weights: {remedy}")


def choose_runner(settings: Mapping[str, Any], blackwell: bool) -> dict[str, str]:
    """Return the backends for a GPU engine where `rollout.sglang` does not set them."""
    # On Blackwell, SGLang's own choice would be flashinfer_trtllm for experts, which swaps gate and up, and deep_gemm
    # for FP8, which repacks the scales.
    runner = "triton" if settings.get("moe_a2a_backend", "none") == "none" else "deep_gemm"
    return {"moe_runner_backend": runner} | ({"fp8_gemm_runner_backend": "triton"} if blackwell else {})


_FIXED_EXPERTS = {
    "MixtralForCausalLM": "SGLang 0.5.23 has no expert locations for it (models/mixtral.py)",
    "Ernie4_5_MoeForCausalLM": "SGLang 0.5.23 has no expert locations for it (models/ernie4.py)",
}
"""Families whose experts an engine cannot place, and why."""
_NO_COPIES = {
    "Glm4MoeForCausalLM": "SGLang 0.5.23 allocates none for it (models/glm4_moe.py:437)",
    "BailingMoeV2ForCausalLM": "SGLang 0.5.23 asserts that it has none (models/bailing_moe.py:220)",
}
"""Families whose experts an engine can place, but not copy, and why."""


def check_experts(hf: HFConfig, config: Config) -> None:
    """Raise ConfigError if engines cannot have the placement of experts that the configuration asks for."""
    rollout = config.rollout
    every, copies, settings = rollout.rebalance_experts_every, rollout.num_redundant_experts, rollout.sglang
    if not every and not copies:
        return
    if not every:
        raise ConfigError(
            f"{rollout.num_redundant_experts=}: the copies' places follow from the load of the experts; also set "
            "rollout.rebalance_experts_every, for example to 1"
        )
    family, where = family_of(hf), f"{rollout.rebalance_experts_every=}"
    experts = family.num_experts(hf)
    if not experts:
        raise ConfigError(f"{where}: {family.architecture} has no experts; set it to 0")
    if rollout.ep == 1:
        raise ConfigError(f"{where} with {rollout.ep=}: one rank has all experts; set the first to 0")
    if why := _FIXED_EXPERTS.get(family.architecture):
        raise ConfigError(f"{where} for {family.architecture}: {why}; set it to 0")
    if copies and (why := _NO_COPIES.get(family.architecture)):
        raise ConfigError(f"{rollout.num_redundant_experts=} for {family.architecture}: {why}; set it to 0")
    if missing := -(experts + copies) % rollout.ep:
        raise ConfigError(
            f"{rollout.num_redundant_experts=}: {rollout.ep=} does not divide {experts} experts with {copies} copies; "
            f"set the first to {copies + missing}"
        )
    if copies and settings.get("enforce_shared_experts_fusion"):
        raise ConfigError(
            f"{rollout.num_redundant_experts=} with rollout.sglang.enforce_shared_experts_fusion: SGLang 0.5.23 would "
            "give the shared expert's tokens to the first copy; remove the second"
        )
    if settings.get("ep_dispatch_algorithm") == "static" and settings.get("moe_a2a_backend", "none") == "none":
        raise ConfigError(
            f"{where} with rollout.sglang.ep_dispatch_algorithm=static: without moe_a2a_backend all ranks must choose "
            "the same copy, which SGLang ensures with dynamic; remove the second"
        )


def _initial_experts(hf: HFConfig, config: Config) -> dict[int | None, tuple[int, ...]]:
    """Return the experts of an engine that has started, by layer, if weight syncs move them; draft models keep
    these."""
    if not config.rollout.rebalance_experts_every:
        return {}
    family, copies = family_of(hf), config.rollout.num_redundant_experts
    experts = family.num_experts(hf)
    return dict.fromkeys((*range(int(hf["num_hidden_layers"])), None), initial_placement(experts, experts + copies))


def layout(hf: HFConfig, config: Config) -> EngineLayout:
    """Return the engines' layout of a configuration. Raises ConfigError for settings that the reshard cannot serve."""
    settings, tp = config.rollout.sglang, config.rollout.tp
    server_args.check(settings)
    check(settings)
    if is_int4(hf):
        check_int4(settings)
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
    check_experts(hf, config)
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
        experts=_initial_experts(hf, config),
        # An untrained draft model stays as loaded.
        draft=bool(config.rollout.num_speculative_tokens and config.train.mtp_loss_coef),
    )
