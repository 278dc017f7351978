"""Runs that train the adapters of two policies, which one engine serves beside weights that it holds once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from training_run import ENVIRONMENT, ONE_RANK, ROOT, build_command, make_folder, read_steps, train, with_host

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


def test_wrong_adapters_stop_the_run_and_name_the_layer(vllm_host: HostProcess, tmp_path: Path) -> None:
    """`train_with_corrupt_sync.py` corrupts a factor in the engine after step 1's comparison, and no hash differs."""
    folder = make_folder(tmp_path / "quickstart", "qwen3_moe")
    tiny_models.save(tiny_models.qwen3(), folder / "dense")
    settings = (
        *(f"model.path={folder}/dense", *ONE_RANK, "model.dtype=float32", "run.save_every=0", "algorithm=grpo"),
        *("kl.apply_to=none", "run.num_update=1", "run.ppo_epochs=1", "lora.rank=4", "actor_optimizer.lr=0.01"),
        *("rollout.engine=vllm", "rollout.max_loras=1", "rollout.max_new_tokens=16"),
    )
    launcher = [sys.executable, "-m", "megarl.torchrun", "--standalone", "--nproc-per-node", "1"]
    command = [*launcher, "tests/train_with_corrupt_sync.py", *build_command(folder, tmp_path / "run", *settings)[3:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=with_host(vllm_host.path))
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Layer 1: the engines' weights differ from the trainer's (" in done.stderr
    assert "lora_" in done.stderr.partition("differ from the trainer's (")[2]
    assert [row["step"] for row in read_steps(tmp_path / "run")] == [1]
