"""Guards in whole runs: rollbacks and alarms, and the engine's weights after a rollback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_run import log_lines, make_folder, read_metrics, run_cli, train

pytestmark = pytest.mark.nightly

GRPO = ["algorithm=grpo", "run.num_update=4", "run.ppo_epochs=2", "run.export=false"]
SPLIT = ["placement={actor: 0, rollout: 1}", "parallel.tp=1", "parallel.ep=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


@pytest.mark.parametrize("placement", [[], SPLIT], ids=["colocated", "split"])
def test_rolls_back_large_updates_and_ends_at_the_third(
    folder: Path, host: str, tmp_path: Path, placement: list[str]
) -> None:
    """The learning rate is far too high in every step."""
    unstable = [
        "actor_optimizer.lr=0.02",
        "actor_optimizer.warmup_fraction=0",
        "run.num_rollout=5",
        "guards.ppo_kl=0.05",
    ]
    done = run_cli(folder, tmp_path / "run", *GRPO, *placement, *unstable, host=host)
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    (error,) = [line for line in done.stderr.splitlines() if "consecutive steps were rolled back" in line]
    assert error.startswith("error: step 3: actor/ppo_kl ") and "lower actor_optimizer.lr" in error
    steps = read_metrics(tmp_path / "run")
    assert [step["guards/rollbacks"] for step in steps] == [1, 2, 3]
    assert all(step["guards/ppo_kl"] > 0.05 for step in steps)
    assert len(log_lines(tmp_path / "run", "ALARM: step")) == 3
    for step in steps:
        # The engine sampled with the weights that the trainer rolled back to, which are the reference's. Single tokens
        # may jump where the two best experts tie within rounding; the rejected weights would be off by 0.5 and more.
        assert step["rollout/logprob_diff_mean"] < 5e-3 and step["rollout/logprob_diff"] < 0.1
        assert abs(step["actor/kl_to_reference"]) < 1e-6


def test_resume_keeps_the_state_of_guards(folder: Path, host: str, tmp_path: Path) -> None:
    """Two steps, and two more after a resume, warn once about the KL and once about a metric out of its band."""
    run_dir = tmp_path / "run"
    bands = "guards.bands={actor/entropy: [50, 60], perf/tokens_per_second_per_rank: [1, null]}"
    guards = [
        "guards.kl=1e-12",
        "kl.estimator=k3",
        "kl.apply_to=loss",
        "guards.alarms=true",
        bands,
        "guards.oom_retry=true",
    ]
    settings = [*GRPO, *guards, "actor_optimizer.lr=1e-3", "actor_optimizer.warmup_fraction=0"]
    train(folder, run_dir, *settings, "run.num_rollout=2", host=host)
    train(folder, run_dir, *settings, "run.num_rollout=4", "run.resume=auto", host=host)
    steps: list[dict[str, Any]] = read_metrics(run_dir)
    assert [step["guards/kl_off"] for step in steps] == [0, 1, 1, 1]
    coefficients = [step["actor/kl_coef"] for step in steps]
    assert min(coefficients[:2]) > 0 and coefficients[2:] == [0, 0]
    assert len(log_lines(run_dir, "is above guards.kl=")) == 1
    assert (
        len(log_lines(run_dir, "ALARM: step 1: actor/entropy is ")) == len(log_lines(run_dir, "actor/entropy is")) == 1
    )
    assert all(step["guards/out_of_band"] >= 1 for step in steps)
    assert all("out of band: " in line for line in log_lines(run_dir, "/s per rank"))
    assert all(step["guards/actor_token_budget"] > 0 == step["guards/actor_out_of_memory"] for step in steps)
    assert all(step["actor/advantage_variance"] >= 0 for step in steps)
