"""The whole program as a user starts it: real Megatron on two gloo ranks, real SGLang engines, a tiny MoE.

One three-step PPO run with engines is shared by the tests; the others replay its rollouts, so they start no engine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.observe.rollout_log import read_rollouts
from megarl.rollout import cpu_torchvision

ROOT = Path(__file__).resolve().parent.parent

SMALL = [
    "run.num_rollout=3",
    "run.save_every=1",
    "run.keep_checkpoints=3",
    "run.eval_every=0",
    "data.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "track.progress=false",
    "reward.functions=[sum_reward:even]",
]
# This tree's package, also in engines, whichever one is installed.
ENVIRONMENT = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]), OMP_NUM_THREADS="1")


def start(folder: Path, run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    paths = [
        f"model.path={folder}/model",
        f"data.train={folder}/train.jsonl",
        f"data.eval={folder}/eval.jsonl",
        f"run.dir={run_dir}",
    ]
    command = [sys.executable, "-m", "megarl.train", "configs/quickstart.yaml", *paths, *SMALL, *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=ENVIRONMENT)


def train(folder: Path, run_dir: Path, *overrides: str) -> None:
    done = start(folder, run_dir, *overrides)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def make_folder(target: Path, family: str) -> Path:
    command = [sys.executable, "tools/make_quickstart.py", str(target), "--family", family]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


@pytest.fixture(scope="module")
def ppo_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "ppo"
    train(folder, run_dir)
    return run_dir


def test_three_steps_of_ppo(ppo_run: Path) -> None:
    rows = [row for row in metrics_of(ppo_run) if "rollout/reward_mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout/logprob_diff_p95"] <= 1e-4  # not the largest: a tie of two experts may fall either way
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
        for name in ("actor/ppo_kl", "actor/pg_clipfrac", "critic/vf_clipfrac", "critic/vf_loss", "actor/entropy"):
            assert name in row, name
        assert row["time/generate"] > 0 and row["time/actor_update"] > 0 and row["time/push_weights"] > 0
    assert list(ppo_run.glob("**/events.out.tfevents*"))


def test_rollouts_are_on_disk_with_weight_versions(ppo_run: Path) -> None:
    for step in (1, 2, 3):
        rollouts = read_rollouts(ppo_run / "rollouts" / f"step_{step:06d}.jsonl")
        assert len(rollouts) == 16 and {r.group for r in rollouts} == {0, 1, 2, 3}
        versions = {turn.weight_version for r in rollouts for turn in r.turns if turn.is_action}
        assert versions == {step - 1}


def test_export_loads_in_transformers_and_holds_the_last_weights(ppo_run: Path, folder: Path) -> None:
    cpu_torchvision.install()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(ppo_run / "export", dtype=torch.float32)
    AutoTokenizer.from_pretrained(ppo_run / "export")
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(ppo_run / "export" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert model.config.num_hidden_layers == 4


def test_resume_equals_the_uninterrupted_run_bit_for_bit(ppo_run: Path, folder: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "resumed"
    checkpoint = "checkpoints/step_000001"
    shutil.copytree(ppo_run / checkpoint, resumed / checkpoint)
    shutil.copy(ppo_run / "config.yaml", resumed / "config.yaml")
    train(folder, resumed, "run.resume=auto", f"rollout.replay={ppo_run}")
    rows = [row for row in metrics_of(resumed) if "rollout/reward_mean" in row]
    assert [row["step"] for row in rows] == [2, 3]
    first = load_file(ppo_run / "export" / "model.safetensors")
    second = load_file(resumed / "export" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    uninterrupted = [row for row in metrics_of(ppo_run) if "rollout/reward_mean" in row][1:]
    for one, other in zip(uninterrupted, rows, strict=True):
        for name in one:
            if name.split("/")[0] in ("actor", "critic", "rollout"):
                assert one[name] == other[name], name


def test_grpo_by_one_key(ppo_run: Path, folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "grpo", "algorithm=grpo", f"rollout.replay={ppo_run}", "run.num_rollout=1")
    (row,) = metrics_of(tmp_path / "grpo")
    assert "actor/ppo_kl" in row and not any(name.startswith("critic/") for name in row)


def test_replayed_routing_closes_the_gap_of_bf16(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 of 64 experts a token, some pair of them nearly ties in bf16 almost everywhere. Of five random models the
    mean gap was 3.1 to 5.0 times as large without replay, the 95th percentile 4.8 to 8.9 times."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "rollout"))
    import tiny_models

    model = tiny_models.qwen3_moe(num_experts=64, num_experts_per_tok=8, num_hidden_layers=4)
    overrides = [
        f"model.path={tiny_models.save(model, tmp_path / 'model')}",
        *("algorithm=grpo", "model.dtype=bfloat16", "train.replay_routing=true"),
        *("run.num_rollout=1", "run.save_every=0", "run.export=false", "rollout.max_turns=1"),
        *("parallel.world_size=1", "parallel.tp=1", "parallel.ep=1"),
    ]
    train(folder, tmp_path / "run", *overrides)
    (row,) = metrics_of(tmp_path / "run")
    for name in ("rollout/logprob_diff_mean", "rollout/logprob_diff_p95"):
        assert 0 < row[name] < 0.5 * row[f"{name}_unreplayed"], (name, row)
    assert "without replay" in (tmp_path / "run" / "log.txt").read_text()


def test_a_broken_reward_ends_the_run_with_one_line(ppo_run: Path, folder: Path, tmp_path: Path) -> None:
    done = start(folder, tmp_path / "run", "reward.functions=[sum_reward:broken]", f"rollout.replay={ppo_run}")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert line.startswith("error: reward function broken on the sample") and "ZeroDivisionError" in line
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "export").exists()


def test_the_hello_script_with_deepseek_and_one_engine_over_two_nodes(tmp_path: Path) -> None:
    """`ranks_per_node=1` makes two nodes of this machine, and the engine's two tensor parallel ranks one on each."""
    folder = make_folder(tmp_path / "deepseek", "deepseek_v3")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    overrides = [
        f"model.path={folder}/model",
        f"data.train={folder}/train.jsonl",
        f"run.dir={tmp_path}/hello",
        *SMALL[1:],
        *("parallel.ranks_per_node=1", "rollout.tp=2", "rollout.max_new_tokens=8", "rollout.max_turns=2"),
        *("train.replay_routing=true", "rollout.verify_every=2"),
    ]
    done = subprocess.run(
        [*command, "launch/ppo_hello.py", *overrides],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "reward" in done.stdout
    rows = metrics_of(tmp_path / "hello")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["rollout/logprob_diff"] for row in rows) <= 1e-4  # of every token: replayed experts cannot tie
    assert ["rollout/logprob_diff_unreplayed" in row for row in rows] == [True, False, True]
    assert {path.stem for path in (tmp_path / "hello" / "logs").glob("*.log")} == {"engine_0_node_0", "engine_0_node_1"}
