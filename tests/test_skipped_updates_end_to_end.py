"""Whole runs with non-finite gradients: all ranks skip the update, and too many skips in a row roll back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import training_run
from training_run import log_lines, make_folder, read_metrics, run_cli, train

pytestmark = pytest.mark.nightly

GRPO = [
    "algorithm=grpo",
    "loss.policy_loss=nonfinite_loss:nonfinite_on_one_rank",
    "run.export=false",
    "run.max_skipped_updates=1",
    "parallel.tp=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


def corrupt_steps(monkeypatch: pytest.MonkeyPatch, run_dir: Path, steps: str) -> None:
    events = {"BAD_LOSS_RUN": str(run_dir), "BAD_LOSS_STEPS": steps}
    monkeypatch.setattr(training_run, "ENVIRONMENT", training_run.ENVIRONMENT | events)


def prompts_of(run_dir: Path, step: int) -> set[str]:
    from megarl.observe.rollout_log import read_rollouts

    return {rollout.prompt.id for rollout in read_rollouts(run_dir, step)}


def test_rolls_back_after_too_many_skipped_updates(
    folder: Path, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of rank 1 are not finite in steps 3 and 4, with two updates each; every step is checkpointed."""
    run_dir = tmp_path / "run"
    corrupt_steps(monkeypatch, run_dir, "3:5")
    updates = [
        "run.num_update=2",
        "run.ppo_epochs=1",
        "run.max_skipped_updates=3",
        "run.num_rollout=6",
        "run.keep_checkpoints=1",
    ]
    train(folder, run_dir, *GRPO, *updates, host=host)
    steps: list[dict[str, Any]] = read_metrics(run_dir)
    assert [step["actor/skipped"] for step in steps] == [0, 0, 1, 1, 0, 0]
    assert [step.get("guards/actor_consecutive_skips") for step in steps] == [None, None, None, 4, None, None]
    assert [step.get("guards/checkpoint_restores") for step in steps] == [None] * 4 + [1, 1]
    (alarm,) = log_lines(run_dir, "ALARM")
    assert "step 4: 4 consecutive updates of the actor were skipped since step 3" in alarm
    assert f"Rolled back weights and optimizer states to {run_dir}/checkpoints/step_000002" in alarm
    # Schedule and engine weights come from the checkpoint; the data continues with the next prompts.
    rates = [step["actor/lr"] for step in steps]
    assert rates[2] == rates[3] and len({rates[0], rates[1], rates[2], rates[4], rates[5]}) == 5
    assert steps[4]["rollout/logprob_diff_p95"] < 1e-4
    prompts_by_step = [prompts_of(run_dir, step) for step in range(1, 7)]
    assert sum(map(len, prompts_by_step)) == len(set.union(*prompts_by_step)) == 24
    host_state = json.loads((run_dir / "checkpoints/step_000006/host.json").read_text())
    assert host_state["guards"]["returns"] == 1 and host_state["guards"]["returned_to"] is None


def test_second_rollback_without_progress_ends_the_run(
    folder: Path, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    corrupt_steps(monkeypatch, run_dir, "2:99")
    done = run_cli(folder, run_dir, *GRPO, "run.num_update=4", "run.ppo_epochs=2", "run.num_rollout=6", host=host)
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    (error,) = [line for line in done.stderr.splitlines() if "were already rolled back" in line]
    assert error.startswith("error: 4 consecutive updates of the actor were skipped since step 3")
    assert "The models were already rolled back to step 1 for this reason" in error
    assert len(read_metrics(run_dir)) == 3 and len(log_lines(run_dir, "ALARM")) == 1


def test_too_many_skips_without_a_checkpoint_end_the_run(
    folder: Path, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    corrupt_steps(monkeypatch, run_dir, "1:99")
    done = run_cli(folder, run_dir, *GRPO, "run.save_every=0", "run.num_update=2", "run.ppo_epochs=1", host=host)
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    assert "There is no checkpoint to roll back to; set run.save_every to write them" in done.stderr
