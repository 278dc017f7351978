"""Runs that train the adapters of two policies, which one engine serves beside weights that it holds once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from training_run import ENVIRONMENT, ONE_RANK, make_folder, read_steps, train

from megarl.engine.engine_host import HostProcess

pytestmark = pytest.mark.nightly


def test_two_policies_train_on_one_engine(
    vllm_host: HostProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dies while the first policy generates for the second step; the second then finds an engine without its
    adapter, which gets it again before it generates."""
    monkeypatch.setitem(ENVIRONMENT, "ENGINE_FAULTS", json.dumps({2: ["kill", 0]}))
    folder, run_dir = make_folder(tmp_path / "quickstart", "qwen3_moe"), tmp_path / "run"
    start = load_file(tiny_models.save(tiny_models.qwen3(), folder / "dense") / "model.safetensors")
    roles = {
        "rollout": {"worker": "faulty_rollout_worker:FaultyRolloutWorker"},
        "rollout_b": {"rollout": {"temperature": 0.9}},
    }
    train(
        folder,
        run_dir,
        *(
            f"model.path={folder}/dense",
            *ONE_RANK,
            "run.num_rollout=3",
            "run.save_every=0",
            f"roles={json.dumps(roles)}",
        ),
        *("algorithm=megarl.controllers.policies:PPOAndReMaxController", "lora.rank=4", "actor_optimizer.lr=0.01"),
        *("rollout.engine=vllm", "rollout.max_loras=2", "rollout.max_new_tokens=16", "rollout.verify_weights_every=2"),
        *("run.num_update=1", "run.ppo_epochs=1", "critic.warmup_steps=0"),
        host=vllm_host.path,
    )
    steps = read_steps(run_dir)
    assert [step.get("rollout/engine_restarts", 0) for step in steps] == [0, 1, 0]
    for step in steps:
        assert step["rollout/logprob_diff"] < 1e-4 and step["b/rollout/logprob_diff"] < 1e-4
        assert step["actor/grad_norm"] > 0 and step["b/actor/grad_norm"] > 0
    assert [path.name for path in (run_dir / "logs").glob("*engine*.log")] == ["engine_0.log"]
    first, second = (load_file(run_dir / name / "model.safetensors") for name in ("export", "export_b"))
    for one, other in ((first, start), (second, start), (first, second)):
        assert float(max((one[name] - other[name]).abs().max() for name in start)) > 1e-3
    assert all(torch.equal(first[name], start[name]) for name in start if "norm" in name)
