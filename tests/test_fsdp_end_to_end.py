"""Megatron-FSDP in whole runs, on the real SGLang and Megatron, compared with a replay without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_run import make_folder, read_steps, train

pytestmark = pytest.mark.nightly

SETTINGS = (
    *("parallel.world_size=2", "parallel.ranks_per_node=2", "parallel.tp=1", "parallel.ep=2"),
    *("rollout.tp=2", "rollout.ep=2", "train.routing_replay=true", "rollout.verify_weights_every=1"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=32", "train.offload=true"),
    *("algorithm=grpo", "kl.apply_to=none", "run.save_every=1", "run.keep_checkpoints=4", "data.eval=[]"),
    *("run.num_update=1", "run.ppo_epochs=1", "reward.functions=[sum_reward:even]"),
    # By default AdamW makes as large an update of a gradient that is rounding alone.
    *("actor_optimizer.eps=1e-3", "actor_optimizer.schedule=constant", "actor_optimizer.warmup_fraction=0"),
)


def test_trains_and_resumes_like_ddp(tmp_path: Path, host: str) -> None:
    """Two steps and, resumed, a third. The engine gets whole weights in each weight sync: trainer and engine agree. A
    run without FSDP on the same rollouts has the same metrics and weights up to rounding."""
    folder, run_dir, other = make_folder(tmp_path / "quickstart", "qwen3_moe"), tmp_path / "run", tmp_path / "ddp"
    train(folder, run_dir, *SETTINGS, "train.fsdp=true", "run.num_rollout=2", host=host)
    train(folder, run_dir, *SETTINGS, "train.fsdp=true", "run.num_rollout=3", "run.resume=auto", host=host)
    train(folder, other, *SETTINGS, "run.num_rollout=3", f"rollout.replay={run_dir}")
    steps, expected = read_steps(run_dir), read_steps(other)
    assert [step["step"] for step in steps] == [step["step"] for step in expected] == [1, 2, 3]
    for step, like in zip(steps, expected, strict=True):
        assert step["rollout/logprob_diff"] <= 1e-4 and step["actor/grad_norm"] > 0
        for name in ("actor/grad_norm", "actor/entropy", "actor/loss"):
            assert step[name] == pytest.approx(like[name], rel=1e-4, abs=1e-7), name
    before = load_file(folder / "model" / "model.safetensors")
    weights, wanted = (load_file(path / "export" / "model.safetensors") for path in (run_dir, other))
    assert weights.keys() == wanted.keys() == before.keys()
    assert any(not torch.equal(weights[name], before[name]) for name in before)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-6)
