"""Which SGLang settings are allowed for engines that receive weight syncs."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from int4_folder import QUANTIZATION

from megarl.config import Config, ConfigError, from_dict
from megarl.engine.sglang import engine_settings, server_args
from megarl.engine.sglang.engine_settings import check, choose_runner
from megarl.models.registry import load_hf_config
from megarl.reshard.plan.layout import EngineLayout

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


def test_layout() -> None:
    assert layout_of(config(tp=4, ep=2)) == EngineLayout(4, 2)
    attention = {"enable_dp_attention": True, "dp_size": 4, "enable_dp_lm_head": True}
    assert layout_of(config(tp=8, ep=8, sglang=attention)) == EngineLayout(8, 8, 4, head_tp=2)
    assert layout_of(config(tp=8, sglang={"attn_dp_size": 2})) == EngineLayout(8, 1, 2)
    dense, sent = {"moe_dense_tp_size": 1}, {"moe_a2a_backend": "deepep"}
    assert layout_of(config(tp=8, ep=8, sglang=dense)) == EngineLayout(8, 8, mlp_tp=1)
    assert layout_of(config(tp=8, ep=8, sglang=sent)) == EngineLayout(8, 8, shared_tp=1)
    assert layout_of(config(tp=8, ep=8, sglang=dense | sent)) == EngineLayout(8, 8, mlp_tp=1, shared_tp=1)
    drafting = [
        layout_of(from_dict({"rollout": {"num_speculative_tokens": tokens}, "train": {"mtp_loss_coef": weight}})).draft
        for tokens, weight in ((0, 0.0), (2, 0.0), (0, 0.1), (2, 0.1))
    ]
    assert drafting == [False, False, False, True]  # an untrained draft model keeps its loaded weights


@pytest.mark.parametrize("key", ["pp_size", "ep_num_redundant_experts", "dp_size", "quantization"])
def test_unsupported_sglang_settings_raise(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.sglang\.{key}"):
        layout_of(config(tp=2, sglang={key: "fp8" if key == "quantization" else 2}))


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"tp": 8, "sglang": {"moe_dense_tp_size": 2}}, "moe_dense_tp_size=2: SGLang knows 1 and rollout.tp=8 only"),
        ({"tp": 8, "ep": 4, "sglang": {"moe_a2a_backend": "deepep"}}, "set rollout.ep to rollout.tp=8"),
        (
            {"tp": 8, "ep": 8, "num_speculative_tokens": 2, "sglang": {"moe_a2a_backend": "deepep"}},
            "set only one of them",
        ),
        (
            {"tp": 8, "ep": 8, "sglang": {"moe_a2a_backend": "deepep", "enforce_shared_experts_fusion": True}},
            "remove the second",
        ),
        ({"tp": 8, "sglang": {"max_total_tokens": "lots"}}, "must be a whole number"),
        ({"tp": 8, "sglang": {"enable_dp_lm_head": True}}, "also set attn_dp_size"),
    ],
)
def test_invalid_combinations_raise(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(config(**rollout))


MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"


def test_experts_are_in_order_until_a_weight_sync_moves_them() -> None:
    hf = load_hf_config(MODELS / "deepseek_v3.json")
    settings = config(tp=8, ep=8, num_redundant_experts=8, rebalance_experts_every=1)
    layout = engine_settings.layout(hf, settings)
    assert layout == EngineLayout(8, 8, experts=dict.fromkeys((*range(61), None), (*range(256), *range(8))))
    assert server_args.expert_args(settings.rollout) == {
        "ep_dispatch_algorithm": "dynamic",
        "ep_num_redundant_experts": 8,
        "disable_shared_experts_fusion": True,
    }
    assert server_args.expert_args(config(rebalance_experts_every=2).rollout) == {"ep_dispatch_algorithm": "dynamic"}
    assert server_args.expert_args(config(tp=8, ep=8).rollout) == {}


@pytest.mark.parametrize(
    ("model", "rollout", "message"),
    [
        ("deepseek_v3", {"rebalance_experts_every": 0}, "also set rollout.rebalance_experts_every"),
        ("qwen2.5_0.5b", {}, "Qwen2ForCausalLM has no experts; set it to 0"),
        ("deepseek_v3", {"ep": 1}, "one rank has all experts"),
        ("deepseek_v3", {"num_redundant_experts": 5}, "256 experts with 5 copies; set the first to 8"),
        ("mixtral_8x7b", {}, "SGLang 0.5.23 has no expert locations for it"),
        ("ernie4.5_21b", {"num_redundant_experts": 0}, "SGLang 0.5.23 has no expert locations for it"),
        ("ling_flash_2.0", {}, "SGLang 0.5.23 asserts that it has none"),
        ("deepseek_v3", {"sglang": {"enforce_shared_experts_fusion": True}}, "remove the second"),
        ("deepseek_v3", {"sglang": {"ep_dispatch_algorithm": "static"}}, "which SGLang ensures with dynamic"),
    ],
)
def test_experts_that_cannot_be_placed(model: str, rollout: dict[str, Any], message: str) -> None:
    settings = {"tp": 8, "ep": 8, "num_redundant_experts": 8, "rebalance_experts_every": 1, **rollout}
    with pytest.raises(ConfigError, match=message):
        engine_settings.layout(load_hf_config(MODELS / f"{model}.json"), config(**settings))


@pytest.mark.parametrize("file", ["bailing_moe", "glm4_moe", "mixtral", "ernie4"])
def test_refused_families_are_those_that_sglang_does_not_support(file: str) -> None:
    source = (server_args.sglang_folder() / "models" / f"{file}.py").read_text()
    assert ("get_model_config_for_expert_location" in source) == (file in ("bailing_moe", "glm4_moe"))
    assert "num_experts=config.n_routed_experts + self.num_fused_shared_experts," in source or file != "glm4_moe"
    assert "assert get_exec().moe.ep_num_redundant_experts == 0" in source or file != "bailing_moe"


def test_int4_layout_needs_the_triton_runner() -> None:
    settings = config(sglang={"moe_runner_backend": "deep_gemm"})
    assert layout_of(settings) == EngineLayout(1)
    with pytest.raises(ConfigError, match="for an INT4 checkpoint SGLang then takes Marlin"):
        engine_settings.layout({"quantization_config": QUANTIZATION}, settings)


def config(**rollout: Any) -> Config:
    return from_dict({"rollout": rollout})


def layout_of(settings: Config) -> EngineLayout:
    return engine_settings.layout({}, settings)
