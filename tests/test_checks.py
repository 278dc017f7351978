"""Checks by themselves; in a whole configuration they are tested with the dry run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.checks import check_drafts, check_enough_prompts, check_oversampling
from megarl.config import Config, ConfigError, from_dict
from megarl.controllers.registry import make_controller

HF = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1024,
}


def drafts(folder: Path | None = None, number: int = 3, **rollout: Any) -> Config:
    model = {"path": str(folder)} if folder else {}
    return from_dict({"model": model, "rollout": {"draft_tokens": number, "max_context": 1020, **rollout}})


def test_drafts_need_a_layer_and_its_tensors(tmp_path: Path) -> None:
    check_drafts(HF, drafts())
    check_drafts(HF | {"num_nextn_predict_layers": 0}, drafts(number=0))
    (tmp_path / "config.json").write_text(json.dumps(HF))
    save_file({"model.layers.2.mlp.gate.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"but {re.escape(str(tmp_path))} has no tensors model\.layers\.3\."):
        check_drafts(HF, drafts(tmp_path))
    save_file({"model.layers.3.eh_proj.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    check_drafts(HF, drafts(tmp_path))


@pytest.mark.parametrize(
    ("changes", "rollout", "complaint"),
    [
        ({"num_nextn_predict_layers": 2}, {}, "this DeepseekV3ForCausalLM has 2; set it to 0"),
        ({}, {"max_context": 1021}, "rollout.draft_tokens=3 needs 1025 positions.* the model has 1024; lower"),
        ({}, {"sglang": {"attn_dp_size": 2}}, "rollout.draft_tokens=3 with rollout.sglang.attn_dp_size: never tried"),
    ],
)
def test_drafts_that_cannot_be(changes: dict[str, Any], rollout: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_drafts(HF | changes, drafts(**rollout))


def oversampled(**rollout: Any) -> Config:
    return from_dict({"algorithm": "grpo", "rollout": rollout, "data": {"prompts_per_step": 4}})


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({}, ""),
        ({"max_lag": 0}, ""),
        ({"oversample": 1.5, "max_lag": 0}, "rollout.max_lag=0: .* longer than a step are never trained on"),
        ({"oversample": 1.5, "max_lag": 3}, "rollout.max_lag=3: .* algorithm=grpo does not correct"),
    ],
)
def test_what_over_sampling_does_to_the_data_is_said(rollout: dict[str, Any], said: str) -> None:
    config, warnings = oversampled(**rollout), list[str]()
    check_oversampling(make_controller(config), config, warnings)
    assert len(warnings) == bool(said) and all(re.search(said, line) for line in warnings)


def test_a_controller_that_corrects_for_lag_is_not_warned_of() -> None:
    config, warnings = oversampled(oversample=2), list[str]()
    controller = make_controller(config)
    controller.corrects_lag = True  # type: ignore[attr-defined]
    check_oversampling(controller, config, warnings)
    assert warnings == []


def test_a_replayed_run_has_nothing_to_over_sample() -> None:
    config = oversampled(oversample=1.5, replay="runs/other")
    with pytest.raises(ConfigError, match="rollout.oversample=1.5 with rollout.replay: .* set the first to 1"):
        check_oversampling(make_controller(config), config, [])
    check_oversampling(make_controller(config), oversampled(replay="runs/other"), [])


def test_no_prompt_is_under_way_twice() -> None:
    check_enough_prompts(6, oversampled(oversample=1.5))
    check_enough_prompts(3, oversampled())
    with pytest.raises(ConfigError, match="prompts_per_step=4 has 6 prompts under way, but data.train has 5; lower"):
        check_enough_prompts(5, oversampled(oversample=1.5))
