"""Whole runs with truncated sampling: trainer and engine agree on log-probs of the truncated distribution."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from training_run import ROOT, make_folder, read_metrics, read_steps, train

from megarl.rollout.partial_rollouts import read_groups

pytestmark = pytest.mark.nightly

TRUNCATED = ["rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.4"]
"""min_p removes most tokens: with random weights all tokens are about equally likely."""
GRPO = ["algorithm=grpo", "kl.apply_to=loss", "run.export=false", "rollout.max_turns=2"]
OVERSAMPLED = ["rollout.oversample=1.5", "rollout.concurrency=6", "rollout.max_staleness=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quickstart with a dense model, because nearly tied experts differ by more than rounding."""
    workdir = tmp_path_factory.mktemp("quickstart")
    created = make_folder(workdir / "q", "qwen3_moe")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "tests" / "rollout"))
        import tiny_models

        shutil.rmtree(created / "model")
        tiny_models.save(tiny_models.qwen3(), created / "model")
    return created


def assert_logprobs_match_truncated_sampling(run_dir: Path, steps: list[int]) -> None:
    rows = read_steps(run_dir)
    assert [row["step"] for row in rows] == steps
    assert "rollout/logprob_diff" in rows[0]  # in later steps all tokens may be stale
    for row in rows:
        assert row.get("rollout/logprob_diff", 0.0) <= 1e-4, row
        assert 1 < row["rollout/sampling_mask_size_mean"] < 19
        assert 0 < row["actor/entropy"] <= math.log(20) and abs(row["actor/ppo_kl"]) < 0.1


@pytest.fixture(scope="module")
def oversampled(folder: Path, host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on two tensor parallel ranks, with partial rollouts."""
    run_dir = tmp_path_factory.mktemp("runs") / "oversampled"
    train(folder, run_dir, *GRPO, *TRUNCATED, *OVERSAMPLED, "parallel.ep=1", host=host)
    return run_dir


def test_logprobs_match_with_partial_rollouts(oversampled: Path) -> None:
    assert_logprobs_match_truncated_sampling(oversampled, [1, 2, 3])
    rows = [row for row in read_metrics(oversampled) if "rollout/partial_groups" in row]
    assert rows[-1]["rollout/partial_groups"] > 0 and any(row["rollout/staleness_max"] > 0 for row in rows)


def test_checkpoint_keeps_sampling_masks_of_partial_groups(
    oversampled: Path, folder: Path, tmp_path: Path, host: str
) -> None:
    """A run with pipeline parallelism resumes from it; the last stage needs the masks."""
    checkpoint = "checkpoints/step_000002"
    shutil.copytree(oversampled / checkpoint, tmp_path / checkpoint)
    shutil.copy(oversampled / "config.yaml", tmp_path / "config.yaml")
    partial_groups = [
        group for file in (tmp_path / checkpoint / "partial_groups").iterdir() for group in read_groups(file)
    ]
    partial = [item for group in partial_groups for item in group if len(item.turns) > 1]
    assert partial and all(item.sampling_masks for item in partial)
    pipeline = ["parallel.tp=1", "parallel.pp=2", "parallel.ep=1"]
    train(folder, tmp_path, *GRPO, *TRUNCATED, *OVERSAMPLED, *pipeline, "run.resume=auto", host=host)
    assert_logprobs_match_truncated_sampling(tmp_path, [3])


def test_asynchronous_generation_on_separate_ranks(folder: Path, tmp_path: Path, host: str) -> None:
    """PPO with actor and critic on one rank and the rollout on the other."""
    ranks = ["parallel.world_size=2", "parallel.ranks_per_node=2", "parallel.tp=1", "parallel.ep=1"]
    placement = ["placement={actor: 0, critic: 0, rollout: 1}", "rollout.asynchronous=true"]
    train(
        folder, tmp_path / "run", "run.export=false", "rollout.max_turns=2", *TRUNCATED, *ranks, *placement, host=host
    )
    assert_logprobs_match_truncated_sampling(tmp_path / "run", [1, 2, 3])


def test_evaluation_uses_its_own_sampling_keys(folder: Path, tmp_path: Path, host: str) -> None:
    """A tiny eval_top_p makes the evaluation greedy; training samples from the full distribution."""
    eval_file = tmp_path / "eval.jsonl"
    eval_file.write_text("".join((folder / "eval.jsonl").read_text().splitlines(keepends=True)[:8]))
    evaluated = [f"data.eval={eval_file}", "run.eval_every=1", "rollout.eval_top_p=0.0001", "parallel.ep=1"]
    train(folder, tmp_path / "run", *GRPO, *evaluated, "run.num_rollout=1", "run.save_every=0", host=host)
    rows = [row for row in read_metrics(tmp_path / "run") if "eval/reward_greedy" in row]
    assert [row["step"] for row in rows] == [0, 1]
    for name in ("reward", "response_length_mean", "turns_mean"):
        assert rows[0][f"eval/{name}_sampled"] == rows[0][f"eval/{name}_greedy"]
    (step,) = read_steps(tmp_path / "run")
    assert step["rollout/logprob_diff_mean"] <= 1e-5 and "rollout/sampling_mask_size_mean" not in step
