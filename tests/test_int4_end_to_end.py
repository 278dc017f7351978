"""Whole runs of a tiny DeepSeek-V3 with INT4 experts, as Kimi-K2-Thinking and Kimi-K2.5 have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from int4_folder import expert_names, quantise_experts
from kimi_k25_folder import PREFIX, VISION, add_tower
from safetensors.torch import load_file
from training_run import make_folder, read_steps, train

from megarl.models import int4
from megarl.models.registry import load_hf_config


@pytest.mark.nightly
@pytest.mark.parametrize("has_tower", [False, True], ids=["kimi_k2_thinking", "kimi_k25"])
def test_grpo_from_an_int4_folder(has_tower: bool, tmp_path: Path, host: str) -> None:
    """Weights are verified by hash after the first sync. The trainer is tensor and expert parallel. With a vision
    tower, as Kimi-K2.5 has it, tensors have a prefix, and the export has the tower's as they were."""
    folder = make_folder(tmp_path / "quickstart", "deepseek_v3")
    before = quantise_experts(folder / "model", model := tmp_path / "int4")
    prefix, vision = "", {}
    if has_tower:
        stored = load_file(add_tower(model) / "model.safetensors")
        prefix, vision = PREFIX, {name: tensor for name, tensor in stored.items() if name.startswith(VISION)}
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
    assert exported.keys() == {prefix + name for name in before} | vision.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in vision.items())
    for name in expert_names(load_hf_config(folder / "model")):
        rounded = exported[prefix + name].clone()
        int4.round_to_grid(rounded)
        assert torch.equal(rounded, exported[prefix + name]) and not torch.equal(rounded, before[name]), name
    assert "quantization_config" not in (tmp_path / "run" / "export" / "config.json").read_text()
