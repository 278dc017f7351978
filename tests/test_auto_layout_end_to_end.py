"""`parallel=auto` in whole runs: the choice of the launcher, of the ranks and of the dry run is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_run import build_command, log_lines, make_folder, read_steps, run_cli, train

from megarl.config import load_config
from megarl.dry_run.validation import validate

AUTO = ["parallel=auto", "run.num_update=1", "run.ppo_epochs=1", "run.export=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


def test_trains_and_resumes_with_the_chosen_layout(folder: Path, host: str, tmp_path: Path) -> None:
    """Two ranks of 0.1 GB, where the model fits only with tensor parallelism and recomputation; then one of more."""
    run_dir = tmp_path / "run"
    small = [*AUTO, "parallel.gpu_gb=0.1"]
    _, _, _, file, *overrides = build_command(folder, tmp_path / "planned", *small)
    report = validate(load_config(file, overrides), dry_run=True)
    assert report.choice is not None, report.errors
    planned = report.choice.config
    assert (planned.parallel.ep, planned.parallel.tp) == (1, 2)
    assert planned.model.megatron["recompute_granularity"] == "full"

    done = run_cli(folder, run_dir, *small, "run.num_rollout=1", host=host)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    trained = load_config(run_dir / "config.yaml")
    assert trained.parallel == planned.parallel and trained.parallel.auto == ()
    assert (trained.model.megatron, trained.rollout.tp) == (planned.model.megatron, planned.rollout.tp)
    (line,) = log_lines(run_dir, "parallel.auto: chosen")
    assert dict(report.choice.describe())["chosen"] in line
    assert log_lines(run_dir, "parallel.auto: runner-up")

    # The same world chooses the same layout.
    train(folder, run_dir, *small, "run.num_rollout=2", "run.resume=auto", host=host)
    assert load_config(run_dir / "config.yaml").parallel == planned.parallel
    changed = [json.loads(line)["key"] for line in (run_dir / "changes.jsonl").read_text().splitlines()]
    assert changed == ["run.num_rollout"]

    # Another world chooses anew, and its checkpoint is in the other layout.
    larger = [*AUTO, "parallel.world_size=1"]  # as much memory as this machine has
    train(folder, run_dir, *larger, "run.num_rollout=3", "run.resume=auto", host=host)
    resumed = load_config(run_dir / "config.yaml")
    assert (resumed.parallel.world_size, resumed.parallel.ep, resumed.model.megatron) == (1, 1, {})
    steps = read_steps(run_dir)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["rollout/logprob_diff_mean"] < 5e-3 for step in steps)
