"""A whole run of a tiny DeepSeek-V3 with INT4 experts, as Kimi-K2-Thinking has them, with real Megatron and SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from int4_folder import expert_names, quantise_experts
from safetensors.torch import load_file
from training_run import make_folder, read_steps, train

from megarl.models import int4
from megarl.models.registry import load_hf_config


@pytest.mark.nightly
def test_grpo_from_an_int4_folder(tmp_path: Path, host: str) -> None:
    """Weights are verified by hash after the first sync. The trainer is tensor and expert parallel."""
    folder = make_folder(tmp_path / "quickstart", "deepseek_v3")
    before = quantise_experts(folder / "model", model := tmp_path / "int4")
    overrides = [
        f"model.path={model}",
        *("model.dtype=bfloat16", "algorithm=grpo", "kl.apply_to=none", "loss.entropy_coef=0.1"),
        *("run.num_rollout=2", "run.save_every=0", "run.export=true", "train.routing_replay=true"),
        *("actor_optimizer.lr=0.01", "actor_optimizer.schedule=constant", "actor_optimizer.warmup_fraction=0"),
    ]
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = read_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    # Noise of bf16, also after the update, which moved the experts' masters off the grid.
    assert max(row["rollout/logprob_diff_mean"] for row in rows) < 0.02, rows
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert exported.keys() == before.keys()
    for name in expert_names(load_hf_config(folder / "model")):
        rounded = exported[name].clone()
        int4.round_to_grid(rounded)
        assert torch.equal(rounded, exported[name]) and not torch.equal(rounded, before[name]), name
    assert "quantization_config" not in json.loads((tmp_path / "run" / "export" / "config.json").read_text())
