"""Runs resumed in another layout match the uninterrupted run on the same recorded rollouts."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from megarl.observe.rollout_log import part_file, write_part
from megarl.types import Prompt, Rollout, Turn

ROOT = Path(__file__).resolve().parents[2]
RunTraining = Callable[..., dict[str, Any]]
CONFIG = """
algorithm: ppo
run: {num_rollout: 4, num_update: 2, save_every: 1, keep_checkpoints: 9}
model: {dtype: float32}
data: {prompts_per_step: 4}
kl: {apply_to: reward, coef: 0.1, target: null, refresh_reference_every: 2}
reward: {functions: ["sum_reward:even"]}
rollout: {samples_per_prompt: 4, max_context: 256, max_new_tokens: 64}
actor_optimizer: {lr: 0.001, warmup_fraction: 0.0, eps: 1.0e-3}
critic: {optimizer: {lr: 0.001, warmup_fraction: 0.0, eps: 1.0e-3}}
train: {max_tokens_per_gpu: 128}
track: {progress: false, trackers: []}
"""
STEPS, SAVED = 4, 3
"""Steps of the uninterrupted run, and the step after which others resume from it. Step 3 begins with a refresh of the
reference, whose weights steps 3 and 4 use."""


def record_rollouts(run_dir: Path) -> None:
    """Write random rollouts as two ranks would that take turns with the samples of each prompt."""
    draw = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        rollouts = []
        for group in range(4):
            prompt = Prompt(f"{step}-{group}", ({"role": "user", "content": "1"},), draw.integers(0, 1000, 10).tolist())
            for seed in range(4):
                count = int(draw.integers(5, 30))
                logprobs = -6.5 + draw.random(count).astype(np.float32)
                answer = Turn(draw.integers(0, 1000, count), logprobs, True, step - 1)
                rollouts.append(Rollout(prompt, (Turn(prompt.token_ids), answer), group=group, seed=seed))
        for rank in range(2):
            numbers = list(range(rank, len(rollouts), 2))
            write_part(part_file(run_dir, step, rank), step, len(rollouts), numbers, [rollouts[i] for i in numbers])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs") / "m"
    command = [sys.executable, "tools/make_quickstart.py", str(folder), "--demonstrations", "8", "--train", "8"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    without_tools = [{name: value for name, value in row.items() if name != "tools"} for row in rows]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in without_tools))
    (folder / "config.yaml").write_text(CONFIG)
    record_rollouts(folder / "recorded")
    return folder


@pytest.fixture(scope="module")
def run(inputs: Path, run_ranks: Callable[..., list[dict[str, Any]]]) -> RunTraining:
    def start(run_dir: Path, world: int, *overrides: str) -> dict[str, Any]:
        all_overrides = [f"model.path={inputs}/model", f"data.train={inputs}/train.jsonl", f"run.dir={run_dir}"]
        all_overrides += [f"rollout.replay={inputs}/recorded", f"parallel.world_size={world}", *overrides]
        config = str(inputs / "config.yaml")
        results = run_ranks(world, "tests/checkpoint/ranks_run.py", "", config, *all_overrides, timeout=600.0)
        return results[0] | {"err": "".join(result["err"] for result in results)}  # only one rank reports the error

    return start


@pytest.fixture(scope="module")
def uninterrupted(run: RunTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    result = run(folder, 2, "parallel.tp=2", "parallel.ep=2")
    assert result["code"] == 0, result
    return folder


def interrupted_copy(uninterrupted: Path, target: Path) -> Path:
    """Copy the run as if it had been killed after `SAVED` steps."""
    shutil.copytree(uninterrupted, target)
    shutil.rmtree(target / "export")
    for step in range(SAVED + 1, STEPS + 1):
        shutil.rmtree(target / f"checkpoints/step_{step:06d}")
    lines = (target / "metrics.jsonl").read_text().splitlines()
    (target / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= SAVED))
    return target


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "actor/lr" in row]


def later_steps(run_dir: Path) -> list[dict[str, float]]:
    parts = ("actor", "critic", "rollout", "reward")
    later = [row for row in steps_of(run_dir) if row["step"] > SAVED]
    return [{name: value for name, value in row.items() if name.split("/")[0] in parts} for row in later]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, ()),
        (2, ("parallel.pp=2", "actor_optimizer.offload_fraction=1", "critic.optimizer.offload_fraction=0.5")),
        pytest.param(
            3,
            ("placement.critic=2", "placement.actor=0-1", "placement.rollout=0-1", "placement.reward=0-1"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            4,
            ("parallel.tp=2", "parallel.cp=2", "critic.parallel.tp=1", "critic.parallel.cp=1", "critic.parallel.pp=2"),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["one rank", "pp=2, states on the host", "separate critic", "four ranks, critic with pp=2"],
)
def test_resume_in_another_layout_matches_uninterrupted_run(
    run: RunTraining, uninterrupted: Path, tmp_path: Path, world: int, layout: tuple[str, ...]
) -> None:
    folder = interrupted_copy(uninterrupted, tmp_path / "run")
    result = run(folder, world, "run.resume=auto", *layout)
    assert result["code"] == 0, result
    assert f"step_{SAVED:06d} was written in another layout" in result["out"]
    first, second = later_steps(uninterrupted), later_steps(folder)
    assert len(first) == len(second) == STEPS - SAVED
    for actual_step, expected_step in zip(first, second, strict=True):
        assert actual_step.keys() == expected_step.keys()
        assert expected_step == pytest.approx(actual_step, rel=1e-6, abs=1e-6)
    weights, resumed_weights = (load_file(path / "export/model.safetensors") for path in (uninterrupted, folder))
    assert weights.keys() == resumed_weights.keys()
    for name, tensor in weights.items():
        assert float((resumed_weights[name] - tensor).norm()) <= 1e-6 * float(tensor.norm()), name


@pytest.mark.parametrize(
    "settings",
    [("lora.rank=4", "lora.alpha=64"), pytest.param((), marks=pytest.mark.nightly)],
    ids=["adapters", "all weights"],
)
def test_refreshed_reference_is_restored_bitwise(run: RunTraining, tmp_path: Path, settings: tuple[str, ...]) -> None:
    result = run(tmp_path / "first", 1, *settings)
    assert result["code"] == 0, result
    first = steps_of(tmp_path / "first")
    assert [row["actor/reference_version"] for row in first] == [0, 0, 1, 1]
    kl = [row["actor/kl_to_reference"] for row in first]
    # The policy equals the reference in the step after the start and after a refresh, and has left it in the next.
    assert kl[0] == kl[2] == 0 and kl[1] != 0 and kl[3] != 0
    folder = interrupted_copy(tmp_path / "first", tmp_path / "second")
    result = run(folder, 1, "run.resume=auto", *settings)
    assert result["code"] == 0, result
    assert later_steps(folder) == later_steps(tmp_path / "first")
    weights, resumed_weights = (load_file(tmp_path / name / "export/model.safetensors") for name in ("first", "second"))
    assert all(bool((weights[name] == resumed_weights[name]).all()) for name in weights)


def test_converted_checkpoint_equals_export(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = runpy.run_path(str(ROOT / "tools/checkpoints.py"))["main"]
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", "convert", str(uninterrupted), str(tmp_path / "out")])
    assert program() == 0
    names = sorted(path.name for path in (uninterrupted / "export").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (uninterrupted / "export" / name).read_bytes(), name
    critic = ["checkpoints.py", "convert", str(uninterrupted), str(tmp_path / "critic"), "--role", "critic"]
    monkeypatch.setattr(sys, "argv", critic)
    assert program() == 0
    assert load_file(tmp_path / "critic/model.safetensors")["score.weight"].any()


def test_resume_refuses_reordered_data_and_forced_logs_provenance(
    run: RunTraining, uninterrupted: Path, inputs: Path, tmp_path: Path
) -> None:
    """A refused start changes nothing in the folder."""
    folder = interrupted_copy(uninterrupted, tmp_path / "run")
    lines = (inputs / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("".join(f"{line}\n" for line in lines[1:] + lines[:1]))
    manifest = folder / f"checkpoints/step_{SAVED:06d}/manifest.json"
    tree = json.loads(manifest.read_text())
    assert len(tree["config"]) == 16 and tree["code"]
    manifest.write_text(json.dumps(tree | {"code": "0123456789abcdef"}))
    before = sorted((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    original = (inputs / "train.jsonl").read_bytes()
    try:
        shutil.copy(tmp_path / "train.jsonl", inputs / "train.jsonl")
        result = run(folder, 1, "run.resume=auto")
        assert result["code"] == 2 and "other training prompts than these" in result["err"], result
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert all(after[path] == content for path, content in before)
        result = run(folder, 1, "run.resume=forced", f"run.num_rollout={SAVED}")
    finally:
        (inputs / "train.jsonl").write_bytes(original)
    assert result["code"] == 0, result
    assert f"after step {SAVED}, written by other code (0123456789abcdef, now " in result["out"]
    assert ", written under another configuration (" in result["out"]
