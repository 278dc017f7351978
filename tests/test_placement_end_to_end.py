"""Whole runs with roles on separate ranks, compared bitwise with one rank that replays the same rollouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_run import (
    ONE_RANK,
    assert_replays,
    check_communication,
    make_folder,
    read_metrics,
    read_steps,
    train,
)

from megarl.observe.rollout_log import read_rollouts

SPLIT = [
    "placement={actor: 0, critic: 1, rollout: 2}",
    *("parallel.world_size=3", "parallel.ranks_per_node=3", "parallel.tp=1", "parallel.ep=1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    created = make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")
    held_out = (created / "eval.jsonl").read_text().splitlines()[:8]
    (created / "eval.jsonl").write_text("\n".join(held_out) + "\n")
    return created


@pytest.fixture(scope="module")
def split_run(folder: Path, host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of PPO, with a checkpoint after each and an evaluation before the first and after the last."""
    run_dir = tmp_path_factory.mktemp("runs") / "split"
    train(folder, run_dir, *SPLIT, "run.eval_every=3", host=host, record=True)
    return run_dir


def weight_versions(run_dir: Path, step: int) -> set[int | None]:
    return {turn.weight_version for rollout in read_rollouts(run_dir, step) for turn in rollout.turns if turn.is_action}


def sample_ids(run_dir: Path, step: int) -> list[tuple[str, int, int]]:
    """Return the prompt, group and seed of each rollout of a step."""
    return [(rollout.prompt.id, rollout.group, rollout.seed) for rollout in read_rollouts(run_dir, step)]


def assert_same_metrics(actual: list[dict[str, float]], expected: list[dict[str, float]], *ignored: str) -> None:
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for actual_row, expected_row in zip(actual, expected, strict=True):
        for name in actual_row:
            if name.split("/")[0] in ("actor", "critic", "rollout") and name not in ignored:
                assert actual_row[name] == expected_row[name], (actual_row["step"], name)


def assert_same_weights(actual: Path, expected: Path) -> None:
    actual_weights, expected_weights = (load_file(path / "export" / "model.safetensors") for path in (actual, expected))
    assert actual_weights.keys() == expected_weights.keys()
    assert [name for name in actual_weights if not torch.equal(actual_weights[name], expected_weights[name])] == []


def test_trains_three_steps_on_three_ranks(split_run: Path, folder: Path) -> None:
    rows = read_steps(split_run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout/logprob_diff_p95"] <= 1e-4
        names = ("actor/grad_norm", "actor/entropy", "critic/grad_norm", "critic/vf_loss")
        assert all(row[name] > 0 for name in names)
        # Roles on rank 0 and on other ranks report it.
        assert row["perf/actor_tflops_per_gpu"] > 0 and row["perf/critic_tflops_per_gpu"] > 0
    for step in (1, 2, 3):
        assert weight_versions(split_run, step) == {step - 1} and len(read_rollouts(split_run, step)) == 16
    evaluated = [row for row in read_metrics(split_run) if "eval/reward_greedy" in row]
    assert [row["step"] for row in evaluated] == [0, 3]
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", split_run / "export"))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    checkpoints = sorted(path.name for path in (split_run / "checkpoints").glob("step_*"))
    assert checkpoints == ["step_000001", "step_000002", "step_000003"]


def test_communication_is_valid_for_nccl(split_run: Path) -> None:
    counts = check_communication(split_run)
    assert counts["send"] == counts["receive"] > 0


def test_replay_on_one_rank_is_bitwise_equal(split_run: Path, folder: Path, tmp_path: Path) -> None:
    """All metrics and weights are equal."""
    train(folder, tmp_path / "alone", *ONE_RANK, f"rollout.replay={split_run}")
    assert_same_metrics(read_steps(split_run), read_steps(tmp_path / "alone"), "rollout/idle_frac")  # of engines
    assert_same_weights(split_run, tmp_path / "alone")


def assert_generation_drains_after_training(run_dir: Path, steps: int) -> None:
    """Check that each step drains generation only after training, although the engine rank trains nothing."""

    def spans(rank: int, name: str) -> list[dict[str, float]]:
        text = (run_dir / "timeline" / f"rank_{rank:05d}.json").read_text().rstrip().rstrip(",]")
        result = [span for span in json.loads(text + "]") if span.get("name") == name]
        return sorted(result, key=lambda span: float(span["ts"]))

    update_spans, drain_spans = spans(0, "actor_update"), spans(1, "drain_generation")
    assert len(update_spans) == 2 * steps and len(drain_spans) == steps
    for step in range(steps):
        last = update_spans[2 * step + 1]
        assert drain_spans[step]["ts"] >= last["ts"] + last["dur"]


ASYNC = ["rollout.asynchronous=true", "run.save_every=0"]
TWO_RANKS = [
    "placement={actor: 0, rollout: 1}",
    *("parallel.world_size=2", "parallel.ranks_per_node=2", "parallel.tp=1", "parallel.ep=1"),
    *("algorithm=grpo", "kl.apply_to=none"),
]


@pytest.mark.nightly
def test_asynchronous_without_staleness_equals_synchronous(
    split_run: Path, folder: Path, host: str, tmp_path: Path
) -> None:
    """Prompts, groups and seeds equal the synchronous run's, nothing is stale, and a replay on one rank is bitwise
    equal."""
    run_dir = tmp_path / "beside"
    train(folder, run_dir, *SPLIT, *ASYNC, "rollout.max_staleness=0", "run.eval_every=3", host=host)
    rows = read_steps(run_dir)
    for step, row in enumerate(rows, 1):
        assert sample_ids(run_dir, step) == sample_ids(split_run, step) and weight_versions(run_dir, step) == {step - 1}
        assert row["rollout/staleness_max"] == 0 and row["rollout/logprob_diff_p95"] <= 1e-4
    logged = [(row["step"], "eval/reward_greedy" in row) for row in read_metrics(run_dir)]
    assert [step for step, evaluates in logged if evaluates] == [0, 3]
    assert logged.index((1, False)) < logged.index((0, True))  # the first step did not wait for the evaluation
    for row in read_metrics(run_dir):
        if "eval/reward_greedy" in row:
            assert row["eval/weight_version"] == row["step"] <= row["eval/weight_version_last"] <= 3
    train(folder, tmp_path / "alone", *ONE_RANK, f"rollout.replay={run_dir}", "run.save_every=0")
    of_engines = [
        name for name in rows[0] if name.startswith(("rollout/staleness", "rollout/group_age", "rollout/idle"))
    ]
    assert_same_metrics(rows, read_steps(tmp_path / "alone"), *of_engines)
    assert_same_weights(run_dir, tmp_path / "alone")


@pytest.mark.nightly
@pytest.mark.parametrize("sync_mode", ["retract", "in_place"])
def test_generation_continues_across_weight_syncs(folder: Path, host: str, tmp_path: Path, sync_mode: str) -> None:
    """With a learning rate of 0 only the weight version changes, so log-probs must match across weight syncs, also with
    a KV cache of older versions. `in_place` does not prefill again, so it replays the recorded routing."""
    run_dir = tmp_path / sync_mode
    # Four conversations at a time: generation takes longer than training, so weight syncs fall into it.
    long = ["rollout.max_new_tokens=150", "rollout.max_context=300", "run.num_rollout=5", "rollout.concurrency=4"]
    long += ["train.routing_replay=true", "rollout.max_turns=1"] if sync_mode == "in_place" else []
    fixed_policy = ["actor_optimizer.lr=0", "rollout.max_staleness=2", f"rollout.on_weight_sync={sync_mode}"]
    train(folder, run_dir, *TWO_RANKS, *ASYNC, *long, *fixed_policy, host=host)
    rows = read_steps(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for step, row in enumerate(rows, 1):
        result = weight_versions(run_dir, step)
        assert all(version is not None and max(0, step - 3) <= version <= step - 1 for version in result)
        differences = [row[name] for name in row if name.startswith("rollout/logprob_diff_p95") and "un" not in name]
        assert differences and max(differences) <= 1e-4
        assert len({group for _, group, _ in sample_ids(run_dir, step)}) == 4 and len(sample_ids(run_dir, step)) == 16
    assert max(row["rollout/staleness_max"] for row in rows) in (1.0, 2.0)
    assert rows[0]["rollout/staleness_max"] == 0 and all(
        row["rollout/group_age_s_max"] >= row["rollout/group_age_s_mean"] > 0 for row in rows
    )
    assert_generation_drains_after_training(run_dir, steps=5)
    mixed = [
        len(turn.version_spans) > 1
        for step in range(1, 6)
        for rollout in read_rollouts(run_dir, step)
        for turn in rollout.turns
    ]
    assert any(mixed) == (sync_mode == "retract")  # a turn of two versions


@pytest.mark.nightly
def test_replay_of_an_asynchronous_run_keeps_its_staleness(folder: Path, host: str, tmp_path: Path) -> None:
    """With truncated sampling and importance weights, bitwise; and from the third step on, where tokens are stale,
    since the engine starts the prompts of three steps at once."""
    run_dir = tmp_path / "run"
    settings = [*TWO_RANKS, *ASYNC, "rollout.max_staleness=2", "correction.kind=tis"]
    settings += ["rollout.temperature=0.7", "rollout.top_k=20", "run.num_rollout=4"]
    train(folder, run_dir, *settings, host=host)
    assert_replays(lambda target, replay: train(folder, target, *settings, replay), run_dir)
    later = [*settings, f"rollout.replay={run_dir}@3", "run.num_rollout=2"]
    train(folder, tmp_path / "later", *later)

    def ages(row: dict[str, float]) -> dict[str, float]:
        return {name: 0.0 for name in row if name.startswith("rollout_corr/kl_staleness")}

    rows = read_steps(run_dir)
    assert [ages(row) for row in read_steps(tmp_path / "later")] == [ages(row) for row in rows[2:]]
    assert all(any(not name.endswith("staleness0") for name in ages(row)) for row in rows[2:])
