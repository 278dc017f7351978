"""Whole runs on pictures: GRPO with a tiny vision-language model, trained with its tower, on the real SGLang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_jobs import shared_jobs
from safetensors.torch import load_file
from training_run import ROOT, assert_replays, read_steps, with_host

from megarl.observe.rollout_log import read_rollouts


def run(tmp_path: Path, family: str, host: str, *overrides: str) -> tuple[Path, Path]:
    """Train two steps. Return the folder of the data, and that of the run."""
    folder, run_dir = tmp_path / "pictures", tmp_path / "run"
    sizes = ["--train", "16", "--held-out", "4"]
    command = [sys.executable, "tools/make_pictures.py", str(folder), "--family", family, *sizes]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    train(folder, run_dir, *overrides, host=host)
    return folder, run_dir


def train(folder: Path, run_dir: Path, *overrides: str, host: str = "") -> None:
    settings = [
        f"run.dir={run_dir}",
        f"model.path={folder}/model",
        f"data.train={folder}/train.jsonl",
        f"data.eval={folder}/eval.jsonl",
        *("run.num_rollout=2", "run.eval_every=0", "run.max_restarts=0", "track.progress=false"),
        *("data.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=3"),
        "reward.functions=[sum_reward:even]",
        *overrides,
    ]
    world = 2 if any("world_size=2" in item for item in overrides) else 1
    variables = with_host(host)
    config = "configs/quickstart_pictures.yaml"
    shared_jobs().run(world, "tests/train_rank.py", config, *settings, timeout=500, variables=variables)


def check_run(folder: Path, run_dir: Path, tower: str) -> None:
    rows = read_steps(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:  # the engine had the trainer's pixels, positions and weights, the tower's among them
        assert row["rollout/logprob_diff_p95"] <= 1e-4, row
        assert row["actor/grad_norm"] > 0
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", run_dir / "export"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if name.startswith(tower)} <= changed
    assert (run_dir / "export/preprocessor_config.json").exists()
    for rollout in read_rollouts(run_dir, 1):
        assert rollout.messages[0]["content"] == "<image> how many squares ?"


def test_qwen2_5_vl_trains_two_steps_and_replays_them_bitwise(tmp_path: Path, host: str) -> None:
    folder, run_dir = run(tmp_path, "qwen2_5_vl", host)
    check_run(folder, run_dir, "visual.")
    assert_replays(lambda target, replay: train(folder, target, replay), run_dir)


@pytest.mark.nightly
def test_qwen3_vl_moe_trains_two_steps_on_two_ranks_and_replays_them_bitwise(tmp_path: Path, host: str) -> None:
    layout = ["parallel.world_size=2", "parallel.ranks_per_node=2", "parallel.tp=2", "parallel.ep=2", "rollout.tp=2"]
    settings = [*layout, "rollout.ep=2", "train.routing_replay=true"]
    folder, run_dir = run(tmp_path, "qwen3_vl_moe", host, *settings)
    check_run(folder, run_dir, "model.visual.")
    assert_replays(lambda target, replay: train(folder, target, *settings, replay), run_dir)


@pytest.mark.nightly
def test_adapters_in_bf16_leave_the_tower_unchanged(tmp_path: Path, host: str) -> None:
    settings = ["model.freeze_vision_tower=true", "model.dtype=bfloat16", "lora.rank=4", "actor_optimizer.lr=0.01"]
    folder, run_dir = run(tmp_path, "qwen2_5_vl", host, *settings)
    for row in read_steps(run_dir):
        assert row["rollout/logprob_diff_p95"] <= 0.1 and row["actor/grad_norm"] > 0, row
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", run_dir / "export"))
    changed = {name for name in before if not torch.equal(before[name].bfloat16(), after[name])}
    assert changed and all(name.startswith("model.layers.") for name in changed)
