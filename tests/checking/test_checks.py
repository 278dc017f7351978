"""Checks by themselves; in a whole configuration they are tested with the dry run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.checking.checks import check_drafts
from megarl.config import Config, ConfigError, from_dict

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
