"""Generation without a trainer, training without engines, and the replay of one step."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import recorded_run
from training_run import (
    ENVIRONMENT,
    ONE_RANK,
    ROOT,
    assert_replays,
    build_command,
    make_folder,
    read_metrics,
    read_steps,
    run_cli,
    train,
)

from megarl.observe.rollout_log import read_rollouts
from megarl.observe.run_folder import RESULT_NAMES

GRPO = ["algorithm=grpo", "run.export=false", "run.ppo_epochs=1", "run.num_update=2"]
RECORDS = ["train.routing_replay=true", "rollout.temperature=0.7", "rollout.top_k=20"]

BLOCK_SGLANG = """
import sys

class SGLangBlocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sglang", "sgl_kernel"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, SGLangBlocker())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


@pytest.fixture(scope="module")
def recorded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "recorded"
    recorded_run.write(run_dir, folder / "model", steps=3)
    return run_dir


@pytest.fixture(scope="module")
def trained(folder: Path, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on recorded rollouts, with routing and sampling masks, where SGLang cannot be imported."""
    workdir = tmp_path_factory.mktemp("without_sglang")
    (workdir / "sitecustomize.py").write_text(BLOCK_SGLANG)
    environment = dict(ENVIRONMENT, PYTHONPATH=os.pathsep.join([str(workdir), ENVIRONMENT["PYTHONPATH"]]))
    probe = [sys.executable, "-c", "import sglang"]
    assert "No module named 'sglang'" in subprocess.run(probe, env=environment, capture_output=True, text=True).stderr
    command = build_command(folder, workdir / "run", *GRPO, *ONE_RANK, *RECORDS, f"rollout.replay={recorded}")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return workdir / "run"


def test_replay_training_needs_no_sglang(trained: Path) -> None:
    rows = read_steps(trained)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:  # the masks and the routing are used
        assert row["rollout/sampling_mask_size_mean"] == recorded_run.CHOICES and "rollout/logprob_diff" in row
    assert "rollout/logprob_diff_mean_unreplayed" in rows[0]


@pytest.mark.nightly
def test_mismatch_tool_agrees_with_the_metrics(trained: Path) -> None:
    """All tokens have truncated sampling; only the first step is also computed without routing replay."""
    rows = {row["step"]: row for row in read_metrics(trained) if "rollout/logprob_diff" in row}
    for step in (1, 2):
        command = [sys.executable, "tools/mismatch.py", str(trained), "--step", str(step), "--json"]
        done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-4000:]
        result, row = json.loads(done.stdout), rows[step]
        causes = {cause["name"]: cause for cause in result["causes"]}
        assert set(causes) == ({"routing"} if step == 1 else set()) | {"truncated sampling", "all"}
        assert len({cause["tokens"] for cause in causes.values()}) == 1 and result["not_finite"] == 0
        assert causes["truncated sampling"]["largest"] == pytest.approx(row["rollout/logprob_diff"], rel=1e-5)
        assert causes["truncated sampling"]["mean"] == pytest.approx(row["rollout/logprob_diff_mean"], rel=1e-5)
        full = row["rollout/logprob_diff_mean" + ("_unreplayed" if step == 1 else "")]
        assert causes["all"]["mean"] == pytest.approx(full, rel=1e-5)
        assert result["worst"][0]["choices"] == recorded_run.CHOICES and result["worst"][0]["text"]


def test_replay_step_reproduces_a_step_bitwise_in_a_debugger(trained: Path) -> None:
    """The replay starts from the previous checkpoint and leaves the run unchanged."""
    before = {path: path.stat().st_mtime_ns for name in RESULT_NAMES for path in (trained / name).rglob("*")}
    command = [sys.executable, "tools/replay_step.py", str(trained), "--step", "3"]
    command += ["--break", "megarl.controllers.policy_gradient:policy_loss"]
    commands = "p ('asked', batch.num_sequences, config.rollout.replay)\n" + "c\n" * 8
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, input=commands, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "from step_000002" in done.stdout and f"('asked', 8, '{trained}')" in done.stdout
    assert done.stdout.count("> ") >= 2 and "policy_loss()" in done.stdout  # once for each update
    num_equal, _, num_total, *_ = done.stdout.splitlines()[-1].split()
    assert num_equal == num_total and int(num_equal) > 30
    assert before == {path: path.stat().st_mtime_ns for name in RESULT_NAMES for path in (trained / name).rglob("*")}


@pytest.mark.nightly
def test_replays_on_another_world_size_from_a_later_step(
    folder: Path, recorded: Path, trained: Path, tmp_path: Path
) -> None:
    """Two tensor parallel ranks train on rollouts of one rank, from its second step on."""
    train(folder, tmp_path / "run", *GRPO, *RECORDS, "run.num_rollout=2", f"rollout.replay={recorded}@2")
    recorded_rows = {row["step"]: row for row in read_metrics(trained) if "rollout/reward_mean" in row}
    for row in read_metrics(tmp_path / "run"):
        for name in ("rollout/reward_mean", "rollout/response_length_mean", "rollout/sampling_mask_size_mean"):
            assert row[name] == recorded_rows[row["step"] + 1][name]


@pytest.mark.nightly
def test_trainer_replays_rollouts_of_a_generate_run(folder: Path, tmp_path: Path, host: str) -> None:
    """Two engines generate two steps, the second after a resume, with prompts in the order of the file."""
    single_rank = ["algorithm=generate", "train.routing_replay=true", "run.save_every=1"]
    train(
        folder,
        tmp_path / "generated",
        *single_rank,
        "run.num_rollout=1",
        "run.eval_every=1",
        "run.eval_samples=2",
        host=host,
    )
    train(folder, tmp_path / "generated", *single_rank, "run.num_rollout=2", "run.resume=auto", host=host)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:8]]
    rollouts_by_step = [read_rollouts(tmp_path / "generated", step, include_trainer_columns=True) for step in (1, 2)]
    for step, rollouts in enumerate(rollouts_by_step):
        assert len(rollouts) == 16
        for item in rollouts:
            row = rows[4 * step + item.group]
            assert item.prompt.ground_truth == row.get("ground_truth", row.get("label"))
            assert {turn.weight_version for turn in item.turns if turn.is_action} == {0}
            assert item.routing is not None and item.reward_parts.keys() == {"even"}
    metrics = read_metrics(tmp_path / "generated")
    evaluated = [row for row in metrics if "eval/reward_greedy" in row]
    assert evaluated and all(row["eval/weight_version"] == 0 for row in evaluated)
    assert all(row["eval/pass_at_1"] <= row["eval/pass_at_2"] for row in evaluated)
    assert not any(name.startswith(("actor/", "critic/", "time/weight_sync")) for row in metrics for name in row)
    assert not (tmp_path / "generated/export").exists()
    assert {path.name for path in (tmp_path / "generated/rollouts/step_000001").iterdir()} == {
        "rank_00000.parquet",
        "rank_00001.parquet",
    }
    view_command = [sys.executable, "tools/view_rollouts.py", str(tmp_path / "generated"), "--step", "2", "--show", "1"]
    assert (
        "turn 1: policy"
        in subprocess.run(view_command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT).stdout
    )
    replay = ["run.num_rollout=2", "train.routing_replay=true", f"rollout.replay={tmp_path}/generated"]
    done = run_cli(folder, tmp_path / "trained", *GRPO, *ONE_RANK, *replay)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert not re.search("deprecat", done.stdout + done.stderr, re.IGNORECASE), done.stderr
    steps = [row for row in read_metrics(tmp_path / "trained") if "actor/grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert steps[0]["rollout/logprob_diff"] <= 1e-4  # the weights are those that generated


@pytest.mark.nightly
def test_dapo_replays_each_generation_of_a_step(folder: Path, tmp_path: Path, host: str) -> None:
    """With two samples, half of the groups have equal rewards, so steps sample again. A replay may ask for fewer
    generations, with other numbers of prompts and samples, on one rank, but not for more than were recorded."""
    settings = ["algorithm=dapo", "rollout.samples_per_prompt=2", "run.save_every=0"]
    train(folder, tmp_path / "run", *settings, "options.max_num_gen_batches=3", host=host)
    rows = read_steps(tmp_path / "run")
    counts = [row["rollout/num_gen_batches"] for row in rows]
    assert max(counts) > 1
    replay = f"rollout.replay={tmp_path}/run"
    assert_replays(
        lambda target, replay: train(folder, target, *settings, "options.max_num_gen_batches=3", replay),
        tmp_path / "run",
    )
    equal = [
        "algorithm=dapo",
        "run.save_every=0",
        "reward.functions=[sum_reward:same]",
        "data.prompts_per_step=2",
        replay,
    ]
    train(
        folder, tmp_path / "fewer", *equal, *ONE_RANK, "options.max_num_gen_batches=1", "rollout.samples_per_prompt=8"
    )
    for step, row in enumerate(read_steps(tmp_path / "fewer"), 1):
        assert row["rollout/num_gen_batches"] == 1
        first = [rollout for rollout in read_rollouts(tmp_path / "run", step) if rollout.group < 4]
        assert [rollout.seed for rollout in read_rollouts(tmp_path / "fewer", step)] == [
            rollout.seed for rollout in first
        ]
    done = run_cli(folder, tmp_path / "more", *equal, *ONE_RANK, "options.max_num_gen_batches=4")
    assert done.returncode and re.search(
        r"step 1 has \d sampling generations, and the algorithm asks for another", done.stdout + done.stderr
    )
