"""Roles on ranks of their own, in whole runs: what comes of it, and that it is what comes of one rank.

One run has an engine; the other replays its rollouts, which are all made on one rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from whole_run import make_folder, metrics_of, train

from megarl.observe.rollout_log import read_rollouts

SPLIT = [
    "placement={actor: 0, critic: 1, rollout: 2}",
    *("parallel.world_size=3", "parallel.ranks_per_node=3", "parallel.tp=1", "parallel.ep=1"),
]
ALONE = ["parallel.world_size=1", "parallel.ranks_per_node=1", "parallel.tp=1", "parallel.ep=1"]
"""All roles on one rank, which has the rollouts then, as the engine's rank had."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")
    held_out = (made / "eval.jsonl").read_text().splitlines()[:8]
    (made / "eval.jsonl").write_text("\n".join(held_out) + "\n")
    return made


@pytest.fixture(scope="module")
def split_run(folder: Path, host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of PPO, with a checkpoint after each and an evaluation before the first and after the last."""
    run_dir = tmp_path_factory.mktemp("runs") / "split"
    train(folder, run_dir, *SPLIT, "run.eval_every=3", host=host)
    return run_dir


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    return [row for row in metrics_of(run_dir) if "rollout/reward_mean" in row]


def versions(run_dir: Path, step: int) -> set[int | None]:
    return {turn.weight_version for one in read_rollouts(run_dir, step) for turn in one.turns if turn.is_action}


def assert_same_figures(one: list[dict[str, float]], other: list[dict[str, float]], *but: str) -> None:
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for mine, theirs in zip(one, other, strict=True):
        for name in mine:
            if name.split("/")[0] in ("actor", "critic", "rollout") and name not in but:
                assert mine[name] == theirs[name], (mine["step"], name)


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = (load_file(path / "export" / "model.safetensors") for path in (one, other))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_three_steps_on_three_ranks(split_run: Path, folder: Path) -> None:
    rows = steps_of(split_run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout/logprob_diff_p95"] <= 1e-4
        names = ("actor/grad_norm", "actor/entropy", "critic/grad_norm", "critic/vf_loss")
        assert all(row[name] > 0 for name in names)
    for step in (1, 2, 3):
        assert versions(split_run, step) == {step - 1} and len(read_rollouts(split_run, step)) == 16
    evaluated = [row for row in metrics_of(split_run) if "eval/reward_greedy" in row]
    assert [row["step"] for row in evaluated] == [0, 3]
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", split_run / "export"))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    kept = sorted(path.name for path in (split_run / "checkpoints").glob("step_*"))
    assert kept == ["step_000001", "step_000002", "step_000003"]


def test_one_rank_makes_the_same_of_the_same_rollouts(split_run: Path, folder: Path, tmp_path: Path) -> None:
    """Bit for bit: every figure, every weight."""
    train(folder, tmp_path / "alone", *ALONE, f"rollout.replay={split_run}")
    assert_same_figures(steps_of(split_run), steps_of(tmp_path / "alone"), "rollout/idle_frac")  # of engines
    assert_same_weights(split_run, tmp_path / "alone")
