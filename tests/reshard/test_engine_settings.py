"""Which SGLang settings are allowed for engines that receive weight syncs."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from megarl.config import ConfigError, server_args
from megarl.reshard.plan import engine_settings
from megarl.reshard.plan.engine_settings import check, choose_runner

pytestmark = pytest.mark.alone

RUNNERS = server_args.load_fields()["moe_runner_backend"].choices
A2A = server_args.load_fields()["moe_a2a_backend"].choices


def check_error(**settings: Any) -> str:
    server_args.check(settings)
    try:
        check(settings)
    except ConfigError as error:
        return str(error)
    return ""


def test_allowed_moe_runner_backends() -> None:
    assert "flashinfer_cutlass" in RUNNERS and len(RUNNERS) > 20
    assert [name for name in RUNNERS if not check_error(moe_runner_backend=name)] == ["deep_gemm", "triton"]
    message = check_error(moe_runner_backend="flashinfer_cutlass")
    assert "rollout.sglang.moe_runner_backend=flashinfer_cutlass" in message and "triton, deep_gemm" in message
    assert "moe_runner_backend=auto" in check_error(moe_runner_backend="auto")  # on Blackwell it swaps gate and up
    assert check_error(speculative_moe_runner_backend="marlin")


def test_allowed_moe_a2a_backends() -> None:
    assert [name for name in A2A if not check_error(moe_a2a_backend=name)] == ["none", "deepep"]


def test_allowed_choices_exist_in_sglang() -> None:
    for name, allowed in engine_settings._ALLOWED.items():
        field = server_args.load_fields()[name]
        assert field.group not in engine_settings._UNRESTRICTED_GROUPS, name
        if isinstance(allowed, tuple) and field.choices:
            assert set(allowed) <= set(field.choices), name
    assert {field.group for field in server_args.load_fields().values()} >= engine_settings._UNRESTRICTED_GROUPS
    assert engine_settings._REMEDIES.keys() <= server_args.load_fields().keys()


@pytest.mark.parametrize(
    "settings",
    [
        {"init_expert_location": '{"physical_to_logical_map": [[1, 0]]}'},
        {"enable_eplb": True},
        {"ep_num_redundant_experts": 2},
        {"ep_dispatch_algorithm": "fake"},
        {"elastic_ep_backend": "mooncake"},
        {"enable_waterfill": True},
        {"enable_paged_experts": True},
        {"kt_weight_path": "/w"},
        {"quantization": "fp8"},
        {"modelopt_quant": "fp8"},
        {"load_format": "flash_rl"},
        {"load_format": "dummy"},
        {"model_impl": "transformers"},
        {"json_model_override_args": '{"num_hidden_layers": 1}'},
        {"delete_ckpt_after_loading": True},
        {"weight_cache_mode": "client"},
        {"cpu_offload_gb": 4},
        {"offload_group_size": 2},
        {"enable_lora": True},
        {"lora_paths": ["a"]},
        {"pp_size": 2},
        {"moe_dp_size": 2},
        {"attn_cp_size": 2},
        {"dcp_size": 2},
        {"enable_prefill_cp": True},
        {"enable_shared_experts_attn_tp": True},
        {"shared_experts_tp_size": 1},
        {"enable_dense_mlp_attn_tp": True},
        {"enable_tp_lm_head_all_to_all": True},
        {"attention_backend": "intel_amx"},
        {"attention_backend": "dsa"},
        {"fp8_gemm_runner_backend": "flashinfer_trtllm"},
        {"fp4_gemm_runner_backend": "marlin"},
        {"enable_nvidia_megakernel": True},
        {"rl_on_policy_target": "fsdp"},
        {"enable_watermark": True},
        {"disaggregation_mode": "prefill"},
        {"speculative_token_map": "/m"},
        {"enable_multi_layer_eagle": True},
        {"dllm_algorithm": "x"},
    ],
    ids=str,
)
def test_settings_that_may_change_weights_are_rejected(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    message = check_error(**settings)
    assert message.startswith(f"rollout.sglang.{name}={value} may change an engine's weights: ")


def test_settings_unrelated_to_weights_are_allowed() -> None:
    settings = {
        "mem_fraction_static": 0.4,
        "max_total_tokens": 4096,
        "chunked_prefill_size": 2048,
        "disable_radix_cache": True,
        "schedule_policy": "lpm",
        "enable_metrics": True,
        "attention_backend": "fa3",
        "kv_cache_dtype": "fp8_e4m3",
        "enable_deterministic_inference": True,
        "cuda_graph_max_bs_decode": 64,
        "disable_shared_experts_fusion": True,
        "init_expert_location": "trivial",
        "quantization": None,
        "load_format": "safetensors",
        "context_length": 8192,
    }
    assert check_error(**settings) == ""


def test_choose_runner() -> None:
    assert choose_runner({}, blackwell=False) == {"moe_runner_backend": "triton"}
    assert choose_runner({"moe_a2a_backend": "deepep"}, blackwell=False) == {"moe_runner_backend": "deep_gemm"}
    events = choose_runner({}, blackwell=True)
    assert events == {"moe_runner_backend": "triton", "fp8_gemm_runner_backend": "triton"}
    assert check_error(**events) == ""


def test_environment_variables_exist_in_sglang() -> None:
    tree = ast.parse((server_args.sglang_folder() / "environ.py").read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    local = {name for name in engine_settings.ENVIRONMENT if name not in names}
    # Not declared in environ.py, but read directly from the environment.
    source = (server_args.sglang_folder() / "layers/quantization/fp8.py").read_text()
    assert all(name in source for name in local) and len(local) <= 1, local
