"""Every layout compared with transformers and torch: log-probs, values, loss, gradients, one AdamW step, resuming.

Each layout is one launch of `ranks_layout.py`, which compares and reports the largest differences. Weights are fp32 and
of the order of 0.1, log-probs of the order of 5.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import tiny  # noqa: E402
from check_parity import FLAGS, LAYOUTS, misses, title  # noqa: E402

MOE = "qwen3_moe:actor deepseek_v3:actor"
DENSE = "qwen2:actor qwen3:actor llama:actor"
# Families that share the table of another.
SHARED_TABLES = "deepseek_llm:actor kimi_k2:actor qwen3_yarn:actor"
VISION = "qwen2_5_vl:actor qwen3_vl_moe:actor"
# The part of tools/check_parity.py's table that covers every feature: layout -> family:role.
MODELS = {
    "": f"{MOE} {DENSE} {SHARED_TABLES} qwen3_vl_moe:actor gemma2:actor deepseek_v2:actor glm4_moe_mtp:actor "
    "deepseek_v3:critic llama:reward_model qwen3_5_mtp:actor deepseek_v32:actor",
    "tp=2": f"{MOE} {DENSE} gemma2:actor qwen3_moe:critic",
    "pp=2": f"{MOE} {DENSE} gemma2:actor gemma2:critic deepseek_v3:critic deepseek_v3_mtp:actor",
    "ep=2,recompute": f"{MOE} deepseek_v3_mtp:actor",
    "overlap": f"{MOE} qwen2:actor qwen3_moe:reward_model",
    "cp=2,selective": "qwen2:actor qwen3_yarn:actor gemma2:actor gpt_oss:actor deepseek_v3:actor qwen2:reward_model "
    "qwen2:dpo",
    "tp=2,etp=2,ep=2": "qwen3_moe:actor qwen3_5_moe_mtp:actor glm4_moe_mtp:actor",
    "tp=2,cp=2,ep=2": "glm_moe_dsa:actor qwen3_moe:actor qwen3_next_mtp:actor deepseek_v3_mtp:actor "
    "deepseek_v3:critic qwen3_moe:reward_model qwen3_moe:dpo",
    "pp=3,vpp=2": "qwen3:actor deepseek_v3:critic qwen3:reward_model deepseek_v3_mtp:dpo",
    "tp=2,ep=2": f"{MOE} deepseek_v2:actor glm4_moe:actor gpt_oss:actor deepseek_v3:critic deepseek_v3:critic@pp=2",
}
LISTED = " ".join(MODELS.values())
# Any other family with experts, once.
MODELS["tp=2,ep=2"] += "".join(
    f" {name}:actor"
    for name in tiny.family_names()
    if not re.search(rf"\b{name}(_mtp)?:", LISTED) and any("experts" in key for key in tiny.HF[name])
)


VISION_MODELS = {
    "": "qwen2_5_vl:actor",
    "tp=2": VISION,
    "pp=2": VISION,
    "ep=2,recompute": "qwen3_vl_moe:actor",
    "overlap": VISION,
    "cp=2,selective": VISION,
    "tp=2,cp=2,ep=2": "qwen3_vl_moe:actor",
}
"""The same for models with a vision tower, which is trained, on sequences with images."""


@pytest.mark.nightly
@pytest.mark.parametrize("layout", VISION_MODELS, ids=title)
def test_layout_matches_transformers_with_images(
    layout: str, run_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    models = VISION_MODELS[layout]
    results = run_ranks(LAYOUTS[layout], "tests/megatron/ranks_layout.py", layout, models, str(tmp_path))
    for rank, result in enumerate(results):
        assert result.keys() == set(models.split())
        for model, numbers in result.items():
            assert not misses(numbers), (rank, model, {name: numbers[name] for name in misses(numbers)})
            assert numbers.keys() >= {*FLAGS, "logprobs", "gradients", "step"}


@pytest.mark.parametrize("layout", MODELS, ids=title)
def test_layout_matches_transformers(
    layout: str, run_ranks: Callable[..., list[dict[str, Any]]], units: dict[str, Any], tmp_path: Path
) -> None:
    models = MODELS[layout]
    results = run_ranks(LAYOUTS[layout], "tests/megatron/ranks_layout.py", layout, models, str(tmp_path))
    assert len(results) == LAYOUTS[layout]
    for rank, result in enumerate(results):
        assert result.keys() == set(models.split())
        for model, numbers in result.items():
            aux = {name.removeprefix("aux "): numbers.pop(name) for name in list(numbers) if name.startswith("aux ")}
            for name in ("replay effect", "indices effect"):
                assert numbers.pop(name, 1.0) > 0.1  # other experts or keys give other log-probs
            assert not misses(numbers), (rank, model, {name: numbers[name] for name in misses(numbers)})
            assert numbers.keys() >= set(FLAGS)
            output_names = {"actor": "logprobs", "dpo": "logprobs", "critic": "values", "reward_model": "scores"}
            assert output_names[model.partition("@")[0].split(":")[1]] in numbers
            if aux and layout != "overlap":  # its micro-batches differ from those of the single process
                expected = units["aux_losses"]["aux"]
                assert aux == pytest.approx({name: expected[f"actor/{name}"] for name in aux}, rel=1e-5)


DYNAMIC_MODELS = {
    "cp=4,dynamic,selective": (4, f"{DENSE} gemma2:actor gpt_oss:actor deepseek_v3:actor qwen2:reward_model qwen2:dpo"),
    "pp=2,cp=2,dynamic,selective": (4, f"{MOE} deepseek_v3:critic"),
    "tp=2,cp=2,ep=2,dynamic,recompute": (
        4,
        "qwen3_moe:actor deepseek_v3_mtp:actor glm_moe_dsa:actor qwen3_next_mtp:actor qwen3_moe:reward_model",
    ),
    "cp=2,ep=4,dynamic": (4, f"{MOE} deepseek_v3:critic"),
    "cp=2,dynamic,overlap": (2, "qwen2:actor qwen2_5_vl:actor deepseek_v32:actor"),
}
"""Layouts with dynamic context parallelism, whose micro-batches have several sizes: ranks and models."""


RunRanks = Callable[..., list[dict[str, Any]]]


def check_dynamic(layout: str, world: int, models: str, run_ranks: RunRanks, folder: Path) -> None:
    for rank, result in enumerate(run_ranks(world, "tests/megatron/ranks_layout.py", layout, models, str(folder))):
        assert result.keys() == set(models.split())
        for model, numbers in result.items():
            assert not misses(numbers), (rank, model, {name: numbers[name] for name in misses(numbers)})
            assert numbers.keys() >= {*FLAGS, "gradients", "step"}


@pytest.mark.parametrize("layout", DYNAMIC_MODELS, ids=title)
def test_dynamic_sizes_match_transformers(layout: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    check_dynamic(layout, *DYNAMIC_MODELS[layout], run_ranks, tmp_path)


@pytest.mark.nightly
def test_dynamic_sizes_in_an_interleaved_schedule(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_dynamic("pp=3,vpp=2,cp=2,dynamic,selective", 6, "qwen3:actor deepseek_v3:critic", run_ranks, tmp_path)


def test_logs_aux_losses_only_if_enabled(units: dict[str, Any]) -> None:
    plain, aux = units["aux_losses"]["plain"], units["aux_losses"]["aux"]
    assert aux.keys() - plain.keys() == {"actor/moe_load_balancing_loss", "actor/moe_z_loss"}
    assert not any("moe_" in name for name in plain)
    assert 1.0 <= aux["actor/moe_load_balancing_loss"] < 2.0  # 1 where experts get equal shares, their number at worst
    assert 1.0 <= units["aux_losses"]["mtp"]["actor/moe_load_balancing_loss"] < 2.0  # over 2 decoder and 2 MTP layers
    assert aux["actor/loss"] == plain["actor/loss"]
    assert abs(aux["actor/grad_norm"] - plain["actor/grad_norm"]) > 0.1  # the gradient includes them


def test_loads_folders_written_by_transformers(units: dict[str, Any]) -> None:
    folder = units["hf_folders"]
    assert max(folder[family] for family in ("qwen3_moe", "deepseek_v3", "qwen2")) < 1e-5
    assert folder["no head"] == 0.0
    assert folder["head"] < 1e-5
    assert "layers.1.self_attn.q_proj.weight or " in folder["not finite"] and "k_proj" in folder["not finite"]


def test_absent_config_keys_match_transformers(units: dict[str, Any]) -> None:
    differences = units["absent_config_keys"]
    assert len(differences) >= 17 and max(differences.values()) < 1e-5, differences


def test_bf16_is_close_and_has_fp32_masters(units: dict[str, Any]) -> None:
    result = units["bf16_training"]
    assert result["difference"] < 0.03
    assert result["last"] < result["first"] - 0.5
    assert result["updated"] > 0.5  # without masters each of the updates would be rounded away
    # The biases of routers choose experts: they are what was loaded, before any forward pass.
    assert result["bias"] == 0.0 < result["bias_size"]


def test_new_critic_outputs_zero_and_trains_its_head_first(units: dict[str, Any]) -> None:
    critic = units["critic"]
    assert critic["values"] == 0.0
    assert critic["shape"] == [1, 32]
    assert critic["gradient"] < 1e-5
    assert critic["grad_norm"] < 1e-5
    assert critic["trunk"] == 0.0
