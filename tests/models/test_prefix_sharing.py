"""Which models compute what sequences have in common once, and the reasons of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import from_dict
from megarl.models.prefix_sharing import reason_against
from megarl.models.registry import load_hf_config

pytestmark = pytest.mark.alone

MODELS = Path(__file__).resolve().parents[2] / "configs/models"


def reason(model: str, has_gpu: bool = False, share: bool | None = None, **megatron: Any) -> str | None:
    config = from_dict({"model": {"megatron": megatron}, "train": {"share_prefixes": share}})
    return reason_against(load_hf_config(MODELS / f"{model}.json"), config, has_gpu)


def test_shares_on_cpus_and_where_asked_on_gpus() -> None:
    assert reason("qwen3_30b_a3b") is None
    assert reason("qwen3_30b_a3b", share=False) == "train.share_prefixes=false"
    assert reason("qwen3_30b_a3b", has_gpu=True) == "train.share_prefixes=null on GPUs"
    assert reason("qwen3_30b_a3b", has_gpu=True, share=True) is None


@pytest.mark.parametrize(
    "model, expected",
    [
        ("qwen3_next_80b_a3b", "gated delta nets"),
        ("glm_5", "sparse attention"),
        ("qwen3_vl_30b_a3b", "a vision tower"),
    ],
)
def test_names_what_a_family_has(model: str, expected: str) -> None:
    assert reason(model) == reason(model, share=True) == expected


@pytest.mark.parametrize(
    "megatron, expected",
    [
        ({"attention_dropout": 0.1}, "model.megatron.attention_dropout"),
        ({"moe_input_jitter_eps": 0.01}, "model.megatron.moe_input_jitter_eps"),
        ({"apply_rope_fusion": True}, "model.megatron.apply_rope_fusion"),
        ({"moe_aux_loss_coeff": 0.001}, "auxiliary losses of routers, which count each token"),
        ({"moe_z_loss_coeff": 0.001}, "auxiliary losses of routers, which count each token"),
        ({"moe_expert_capacity_factor": 1.0}, "model.megatron.moe_expert_capacity_factor, by which tokens compete"),
    ],
)
def test_names_settings_that_depend_on_each_token(megatron: dict[str, Any], expected: str) -> None:
    assert reason("qwen3_30b_a3b", **megatron) == expected


def test_sinks_have_no_form_on_gpus() -> None:
    assert reason("gpt_oss_20b") is None
    assert reason("gpt_oss_20b", has_gpu=True, share=True) == "attention with sinks on GPUs"
