"""Runs with a second model on engines of its own: a frozen judge, in turns with the policy's engine and beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training_run import ONE_RANK, make_folder, read_steps, train

# Greedy rollouts are the same in all runs: an engine's random numbers depend on the order of its requests.
STEPS = ("run.num_rollout=2", "run.save_every=0", "run.export=false", "rollout.temperature=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


@pytest.fixture(scope="module")
def judged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Settings of a judge of another family. A grammar makes its random weights state a score."""
    judge = make_folder(tmp_path_factory.mktemp("judge") / "q", "deepseek_v3")
    roles: dict[str, Any] = {
        "judge": {"backend": "sglang", "model": f"{judge}/model", "rollout": {"max_context": 256, "concurrency": 8}},
        "reward": {
            "backend": "judge",
            "options": {
                "prompt": "{question} {answer} {ground_truth}?",
                "request": {"max_tokens": 12, "regex": "Score: [0-9]"},
            },
        },
    }
    return f"roles={json.dumps(roles)}"


@pytest.fixture(scope="module")
def colocated_run(folder: Path, judged: str, host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "colocated"
    train(folder, run_dir, *STEPS, *ONE_RANK, judged, host=host)
    return run_dir


def test_judge_scores_in_turns_with_the_policys_engine(colocated_run: Path) -> None:
    rows = read_steps(colocated_run)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["reward/judge"] <= 9 and row["rollout/reward_failed_frac"] == 0
        assert row["rollout/logprob_diff_p95"] <= 1e-4 and row["actor/grad_norm"] > 0
    assert (colocated_run / "logs" / "judge_engine_0.log").exists()


@pytest.mark.nightly
def test_judge_on_its_own_rank_gives_the_same_rewards(
    colocated_run: Path, folder: Path, judged: str, host: str, tmp_path: Path
) -> None:
    placement = ["placement={actor: 0, critic: 0, rollout: 0, judge: 1}"]
    layout = ["parallel.world_size=2", "parallel.ranks_per_node=2", "parallel.tp=1", "parallel.ep=1"]
    train(folder, tmp_path / "split", *STEPS, *placement, *layout, judged, host=host)
    assert_same_steps(read_steps(tmp_path / "split"), read_steps(colocated_run))


@pytest.mark.nightly
def test_lost_judge_restarts_and_gives_the_same_rewards(
    colocated_run: Path, folder: Path, judged: str, host: str, tmp_path: Path
) -> None:
    roles = json.loads(judged.partition("=")[2])
    roles["judge"]["worker"] = "dying_engine_worker:DyingEngineWorker"
    train(folder, tmp_path / "lost", *STEPS, *ONE_RANK, f"roles={json.dumps(roles)}", host=host)
    steps = read_steps(tmp_path / "lost")
    assert [row.get("judge/engine_restarts", 0) for row in steps] == [0, 1]
    assert_same_steps(steps, read_steps(colocated_run))


@pytest.mark.nightly
@pytest.mark.parametrize("ahead", ["rollout.asynchronous=true", "rollout.oversample=1.5"])
def test_judge_takes_turns_with_engines_that_generate_ahead(
    ahead: str, folder: Path, judged: str, host: str, tmp_path: Path
) -> None:
    """Unfinished responses are interrupted while the judge is awake, and go on afterwards."""
    train(folder, tmp_path / "run", *STEPS, *ONE_RANK, judged, ahead, "rollout.temperature=1", host=host)
    rows = read_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["reward/judge"] <= 9 and row["rollout/reward_failed_frac"] == 0
        assert row["rollout/aborted_frac"] == 0 and row["actor/grad_norm"] > 0


def assert_same_steps(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Check that rewards and updates are bitwise equal."""
    for row, expected_row in zip(actual, expected, strict=True):
        names = [name for name in expected_row if name.startswith(("reward/", "rollout/reward", "actor/"))]
        assert {name: row[name] for name in names} == {name: expected_row[name] for name in names}
