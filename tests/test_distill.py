"""Distillation in a whole run: the engine generates, and Megatron computes policy and teacher in turn."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from training_run import make_folder, read_metrics, run_cli, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quickstart and a teacher: the same model with logits three times as large."""
    folder = make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")
    shutil.copytree(folder / "model", folder / "teacher")
    weights = load_file(folder / "teacher" / "model.safetensors")
    weights["lm_head.weight"] = 3.0 * weights["lm_head.weight"]
    save_file(weights, folder / "teacher" / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.nightly
def test_reverse_kl_to_the_teacher_falls(folder: Path, tmp_path: Path, host: str) -> None:
    overrides = ["algorithm=distill", f"roles={{teacher: {{model: {folder}/teacher}}}}", "reward.functions=[]"]
    overrides += ["run.num_rollout=12", "run.num_update=2", "run.ppo_epochs=1", "run.save_every=0", "run.export=false"]
    overrides += ["rollout.max_turns=1", "rollout.max_new_tokens=16", "rollout.samples_per_prompt=16"]
    overrides += ["parallel.world_size=1", "parallel.tp=1", "parallel.ep=1", "kl.apply_to=none"]
    overrides += [
        "options={advantage_clip: 5, center_advantages: true}",
        "actor_optimizer.lr=0.001",
        "actor_optimizer.schedule=constant",
    ]
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = read_metrics(tmp_path / "run")
    result = [row["distill/reverse_kl"] for row in rows]
    assert len(result) == 12 and all(row["rollout/logprob_diff_p95"] <= 1e-4 for row in rows)
    assert result[0] > 1.0 and sum(result[-3:]) / 3 < 0.65 * result[0], result
    assert all("time/teacher_logprobs" in row and "time/reward" not in row for row in rows)
    assert "reverse KL to the teacher" in (tmp_path / "run" / "log.txt").read_text()


def test_missing_teacher_fails_before_start(folder: Path, tmp_path: Path) -> None:
    done = run_cli(folder, tmp_path / "run", "algorithm=distill", "kl.apply_to=none")
    assert done.returncode == 2 and "roles.teacher.model is not set; it must name the HF folder" in done.stderr
    assert not (tmp_path / "run" / "logs").exists()
