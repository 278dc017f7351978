"""Runs that train two policies in one flow, on real engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from training_run import ONE_RANK, assert_replays, make_folder, read_metrics, read_steps, train

from megarl.observe.rollout_log import read_rollouts

TWO_RANKS = ("parallel.world_size=2", "parallel.ranks_per_node=2", "parallel.tp=1", "parallel.ep=1")
STEPS = ("run.num_rollout=2", "run.save_every=1", "run.keep_checkpoints=2")
BOTH = "algorithm=megarl.controllers.policies:PPOAndReMaxController"
DIALOGUE = ("algorithm=megarl.controllers.dialogue:DialogueController", "kl.apply_to=none", "rollout.max_context=512")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


def roles(**settings: object) -> str:
    return f"roles={json.dumps(settings)}"


def exported(run_dir: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(run_dir / name / "model.safetensors")


def is_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_two_algorithms_train_two_policies(folder: Path, host: str, tmp_path: Path) -> None:
    """PPO and ReMax start from one model, with other learning rates and temperatures, and take turns on one rank."""
    settings = roles(actor_b={"optimizer": {"lr": 0.001}}, rollout_b={"rollout": {"temperature": 0.9}})
    run_dir = tmp_path / "run"
    train(folder, run_dir, *STEPS, *ONE_RANK, BOTH, settings, host=host)
    for row in read_steps(run_dir):
        assert row["rollout/logprob_diff_p95"] <= 1e-4 and row["b/rollout/logprob_diff_p95"] <= 1e-4
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0 and row["b/actor/grad_norm"] > 0
        assert row["b/actor/lr"] > row["actor/lr"] and "b/rollout/reward_greedy" in row
    start = load_file(folder / "model" / "model.safetensors")
    first, second = exported(run_dir, "export"), exported(run_dir, "export_b")
    assert not is_equal(first, second) and not is_equal(first, start) and not is_equal(second, start)


@pytest.mark.nightly
def test_two_policies_resume_bitwise(folder: Path, host: str, tmp_path: Path) -> None:
    """Rollouts are greedy: the engines' random numbers are not part of a checkpoint. Only the other policy has a
    critic."""
    settings = roles(actor_b={"optimizer": {"lr": 0.001}}, critic_b={"optimizer": {"lr": 0.002}})
    greedy = ("algorithm=greedy_policies:ReinforceAndPPOController", "advantage.estimator=reinforce_pp")
    overrides = (*STEPS, *ONE_RANK, *greedy, "rollout.temperature=0", settings)
    run_dir, resumed = tmp_path / "run", tmp_path / "resumed"
    train(folder, run_dir, *overrides, host=host)
    checkpoint = run_dir / "checkpoints" / "step_000002"
    assert {"actor", "actor_b", "critic_b"} <= {path.name for path in checkpoint.iterdir()}
    shutil.copytree(run_dir, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000002")
    for name in ("export", "export_b"):
        shutil.rmtree(resumed / name)
    train(folder, resumed, *overrides, "run.resume=auto", host=host)
    for name in ("export", "export_b"):
        assert is_equal(exported(resumed, name), exported(run_dir, name))
    step, again = (read_metrics(path)[-1] for path in (run_dir, resumed))
    assert step["step"] == again["step"] == 2 and step["b/actor/grad_norm"] > 0 and step["b/critic/grad_norm"] > 0
    assert step["b/critic/lr"] > step["b/actor/lr"]
    # The engines' own log-probs depend on how requests were batched.
    names = [name for name in step if name.startswith(("actor/", "b/actor/", "b/critic/", "rollout/reward"))]
    assert {name: step[name] for name in names} == {name: again[name] for name in names}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model, whose prompts are rendered by its own template."""
    return make_folder(tmp_path_factory.mktemp("other") / "q", "deepseek_v3") / "model"


class AheadRun(NamedTuple):
    """A run in which both policies generate ahead."""

    run_dir: Path
    overrides: tuple[str, ...]


@pytest.fixture(scope="module")
def ahead(folder: Path, other: Path, host: str, tmp_path_factory: pytest.TempPathFactory) -> AheadRun:
    """Two models; the engine of the first has a rank of its own, that of the other shares one with both trainers. The
    reference of each is refreshed before the third step."""
    settings = roles(actor_b={"model": f"{other}"}, rollout_b={"rollout": {"oversample": 1.5}})
    placement = "placement={actor: 0, critic: 0, actor_b: 0, rollout: 1, rollout_b: 0}"
    generation = ("rollout.asynchronous=true", "rollout.max_staleness=1", "kl.refresh_reference_every=2")
    steps = ("run.num_rollout=4", "run.save_every=1", "run.keep_checkpoints=4")
    overrides = (*steps, *TWO_RANKS, BOTH, settings, placement, *generation)
    run_dir = tmp_path_factory.mktemp("ahead") / "run"
    train(folder, run_dir, *overrides, host=host)
    return AheadRun(run_dir, overrides)


@pytest.mark.nightly
def test_both_policies_generate_ahead(ahead: AheadRun) -> None:
    """Each samples its own prompts' tokens from its own stream."""
    rows = read_steps(ahead.run_dir)
    assert rows[0]["rollout/logprob_diff_p95"] <= 1e-4 and rows[0]["b/rollout/logprob_diff_p95"] <= 1e-4
    for row in rows:  # later steps have only tokens of older weights
        assert row["rollout/staleness_max"] <= 1 and row["b/rollout/staleness_max"] <= 1
        assert "rollout/partial_groups" not in row and "b/rollout/partial_groups" in row
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    for prefix in ("", "b/"):  # right after a refresh a policy is its own reference
        assert [row[f"{prefix}actor/reference_version"] for row in rows] == [0, 0, 1, 1]
        assert [abs(row[f"{prefix}actor/kl_to_reference"]) < 1e-6 for row in rows] == [True, False, True, False]
    checkpoint = ahead.run_dir / "checkpoints" / "step_000003"
    assert {"reference", "reference_b", "partial_groups_b"} <= {path.name for path in checkpoint.iterdir()}
    for step in (1, 2, 3, 4):
        assert len(read_rollouts(ahead.run_dir, step)) == 16
        assert len(read_rollouts(ahead.run_dir / "policies" / "b", step)) == 20  # with a greedy answer to each prompt


@pytest.mark.nightly
def test_replay_of_two_policies_and_its_resume_are_bitwise_equal(ahead: AheadRun, folder: Path) -> None:
    assert_replays(lambda path, *more: train(folder, path, *ahead.overrides, *more), ahead.run_dir)
    replayed = ahead.run_dir.with_name("run_replayed")
    resumed = ahead.run_dir.with_name("run_resumed")
    shutil.copytree(replayed, resumed)
    for path in (resumed / "checkpoints" / "step_000004", *resumed.glob("export*")):
        shutil.rmtree(path)
    train(folder, resumed, *ahead.overrides, f"rollout.replay={ahead.run_dir}", "run.resume=auto")
    for name in ("export", "export_b"):
        assert is_equal(exported(resumed, name), exported(replayed, name))
    assert read_steps(resumed)[-1]["b/actor/kl_to_reference"] == read_steps(replayed)[-1]["b/actor/kl_to_reference"]


@pytest.mark.nightly
def test_two_models_talk_and_learn_on_ranks_of_their_own(folder: Path, other: Path, host: str, tmp_path: Path) -> None:
    """The solver's first answers are the first that are complete of conversations that run ahead."""
    settings = roles(actor_b={"model": f"{other}"})
    placement = "placement={actor: 0, rollout: 0, actor_b: 1, rollout_b: 1}"
    generation = ("rollout.asynchronous=true", "rollout.oversample=1.5", "rollout.max_staleness=1")
    overrides = (*STEPS, *DIALOGUE, *TWO_RANKS, placement, settings, *generation)
    train(folder, tmp_path / "run", *overrides, host=host)
    for row in read_steps(tmp_path / "run"):
        assert row["rollout/logprob_diff_p95"] <= 1e-4 and row["b/rollout/logprob_diff_p95"] <= 1e-4
        assert 0 < row["dialogue/complete_frac"] <= 1
    assert exported(tmp_path / "run", "export").keys() != exported(tmp_path / "run", "export_b").keys()
    assert_replays(lambda path, *more: train(folder, path, *overrides, *more), tmp_path / "run")
