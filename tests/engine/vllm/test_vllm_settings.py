"""Settings that `rollout.engine=vllm` refuses, and the arguments that it passes to vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, ConfigError, from_dict
from megarl.engine.engine_backends import engine_backend
from megarl.engine.vllm import vllm_settings
from megarl.engine.vllm.vllm_engine import engine_args
from megarl.models.family import HFConfig
from megarl.models.memory import engine_parts

pytestmark = pytest.mark.alone

DENSE: HFConfig = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "SGLang's settings": ({}, {"sglang": {"page_size": 4}}, "rollout.sglang.page_size with rollout.engine=vllm"),
    "heads of 16": ({"hidden_size": 64}, {}, "vLLM's attention on a CPU has no heads of 16, only of 32"),
    "another family": (
        {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
        {},
        "where vLLM has the weights of Gemma2ForCausalLM has not been reviewed",
    ),
    "FP8": ({"quantization_config": {"quant_method": "fp8"}}, {}, "with a quantised checkpoint"),
    "ep within tp": ({}, {"tp": 4, "ep": 2}, "set it to 1 or to rollout.tp=4"),
    "several machines": ({}, {"tp": 2}, "parallel.ranks_per_node=1; lower it"),
    "a managed setting": ({}, {"vllm": {"dtype": "half"}}, "rollout.vllm.dtype cannot be set; .*by model.dtype"),
    "an unread setting": (
        {},
        {"vllm": {"max_num_seq": 3}},
        "rollout.vllm.max_num_seq may not.*did you mean max_num_seqs",
    ),
    "another type": ({}, {"vllm": {"max_num_seqs": True}}, "max_num_seqs must be an integer, not True"),
    "a small number": ({}, {"vllm": {"max_num_seqs": 0}}, "max_num_seqs must be at least 1, not 0"),
    "a small cache": (
        {},
        {"vllm": {"num_gpu_blocks_override": 4}, "max_context": 128},
        "num_gpu_blocks_override=4 has no room for one conversation",
    ),
    "a small batch": ({}, {"vllm": {"max_num_batched_tokens": 8}, "concurrency": 16}, "one token for each of 16"),
}


def make(hf: dict[str, Any], rollout: dict[str, Any], **sections: Any) -> tuple[HFConfig, Config]:
    parallel = {"world_size": 4, "ranks_per_node": 4 if rollout.get("ep") else 1}
    config = from_dict({"rollout": {"engine": "vllm", **rollout}, "parallel": parallel, **sections})
    return {**DENSE, **hf}, config


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_line(case: str) -> None:
    hf, rollout, message = REFUSED[case]
    hf, config = make(hf, rollout)
    with pytest.raises(ConfigError, match=message) as error:
        engine_backend(config).check(hf, config)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("hf", "rollout", "rank", "message"),
    [
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4},
            {},
            4,
            "rollout.max_loras=2 with a model with experts: vLLM's experts with adapters need Triton",
        ),
        ({}, {}, 1000, "with lora.rank=1000: vLLM serves ranks up to 512"),
        (
            {},
            {"vllm": {"max_lora_rank": 8}},
            4,
            "max_lora_rank cannot be set; it is decided by lora.rank and model.dtype",
        ),
        ({}, {"engine": "sglang"}, 4, "rollout.max_loras=2 with rollout.engine=sglang is not implemented"),
    ],
    ids=["experts", "a large rank", "a managed setting", "SGLang"],
)
def test_refuses_adapters(hf: dict[str, Any], rollout: dict[str, Any], rank: int, message: str) -> None:
    hf, config = make(hf, {"max_loras": 2, **rollout}, lora={"rank": rank})
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine_backend(config).check(hf, config)


def test_vllm_adapts_the_layers_with_adapters(tmp_path: Path) -> None:
    """With the least of its ranks that has room."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    lora = {"rank": 9, "target_modules": ["linear_proj", "linear_fc1"]}
    _, config = make({}, {"max_loras": 3}, lora=lora, model={"path": str(tmp_path)})
    arguments = engine_args(config, 0)
    assert (arguments["enable_lora"], arguments["max_loras"], arguments["max_lora_rank"]) == (True, 3, 16)
    assert arguments["lora_target_modules"] == ["gate_up_proj", "o_proj"]
    assert "enable_lora" not in engine_args(make({}, {})[1], 0)


def test_refuses_settings_of_the_other_engine() -> None:
    config = from_dict({"rollout": {"vllm": {"max_num_seqs": 4}}})
    with pytest.raises(ConfigError, match="rollout.vllm.max_num_seqs with rollout.engine=sglang"):
        engine_backend(config).check(DENSE, config)


def test_refuses_routing_without_prefix_cache() -> None:
    hf, config = make({}, {"vllm": {"enable_prefix_caching": False}}, train={"routing_replay": True})
    with pytest.raises(ConfigError, match=r"enable_prefix_caching=false with train\.routing_replay"):
        engine_backend(config).check(hf, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.005}, "rollout.temperature=0.005 with rollout.engine=vllm, which raises it to 0.01"),
        ({"eval_temperature": 0.001}, "rollout.eval_temperature=0.001"),
        ({"top_k": 1}, "rollout.top_k=1 leaves nothing to sample"),
        ({"min_p": 0.1, "num_speculative_tokens": 2}, "rollout.min_p=0.1 with rollout.num_speculative_tokens=2"),
    ],
)
def test_refuses_other_distributions(settings: dict[str, Any], message: str) -> None:
    _, config = make({}, settings)
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine_backend(config).check_sampling(config)


def test_truncation_needs_no_bound_of_its_masks() -> None:
    _, config = make({}, {"top_p": 0.9})
    engine_backend(config).check_sampling(config)


def test_names_the_command_that_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installer's stamp is needed too: without it the installation was interrupted."""
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    own = f"vLLM is not installed in {tmp_path}/vllm; install it by bash launch/install_vllm.sh {tmp_path}/bin/python"
    with pytest.raises(ConfigError, match=re.escape(own)):
        vllm_settings.check_installed()
    (tmp_path / "installed-by-megarl").touch()
    python = Path(vllm_settings.interpreter())
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(ConfigError, match="vLLM is not installed.*MEGARL_VLLM=1 bash launch/install.sh"):
        vllm_settings.check_installed()
    (tmp_path / "vllm" / "installed-by-megarl").touch()
    with pytest.raises(ConfigError, match="has no version of vLLM, not 0.32.0"):
        vllm_settings.check_installed()


def test_machines_with_a_gpu_are_not_told_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_dict({"rollout": {"engine": "vllm"}})
    monkeypatch.setattr("megarl.parallel.device.has_cuda", lambda: True)
    for check in (engine_backend(config).check_installed, lambda: engine_backend(config).check_platform(config)):
        with pytest.raises(ConfigError, match="this machine has a GPU; use rollout.engine=sglang"):
            check()


def test_the_plan_has_the_cache_of_the_settings() -> None:
    """Without a setting it holds all conversations, and a block for the rest of each."""
    hf, config = make({}, {"concurrency": 3, "max_context": 100})
    arguments = engine_args(config, 2)
    assert arguments["num_gpu_blocks_override"] * 32 >= 3 * 128 + 32 and arguments["max_num_seqs"] == 3
    assert arguments["max_model_len"] == 100 and arguments["seed"] == config.run.seed + 2
    cached = 2 * 2 * 2 * 32 * 4  # keys and values of two layers with two heads of 32 elements of 4 bytes
    assert engine_parts(hf, config.rollout, 4)["engine KV cache"] == 300 * cached
    _, config = make({}, {"vllm": {"num_gpu_blocks_override": 7}})
    assert engine_args(config, 0)["num_gpu_blocks_override"] == 7
    assert engine_parts(hf, config.rollout, 4)["engine KV cache"] == 7 * 32 * cached
