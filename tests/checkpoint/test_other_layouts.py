"""Whole runs that go on in another layout: as the undisturbed run does, from the same recorded rollouts."""

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
Run = Callable[..., dict[str, Any]]
CONFIG = """
algorithm: ppo
run: {num_rollout: 3, num_update: 2, save_every: 1, keep_checkpoints: 9}
model: {dtype: float32}
data: {prompts_per_step: 4}
kl: {apply_to: none}
reward: {functions: ["sum_reward:even"]}
rollout: {samples_per_prompt: 4, max_context: 256, max_new_tokens: 64}
actor_optimizer: {lr: 0.001, warmup_fraction: 0.0, eps: 1.0e-3}
critic: {optimizer: {lr: 0.001, warmup_fraction: 0.0, eps: 1.0e-3}}
train: {max_tokens_per_gpu: 128}
track: {progress: false, trackers: []}
"""
STEPS, SAVED = 3, 1
"""Of the undisturbed run, and after how many of them it is left and gone on with elsewhere."""


def record(run_dir: Path) -> None:
    """Sampled by nobody, on two ranks, which have the samples of each prompt in turn."""
    draw = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        rollouts = []
        for group in range(4):
            prompt = Prompt(f"{step}-{group}", ({"role": "user", "content": "1"},), draw.integers(0, 1000, 10).tolist())
            for seed in range(4):
                count = int(draw.integers(5, 30))
                said = -6.5 + draw.random(count).astype(np.float32)
                answer = Turn(draw.integers(0, 1000, count), said, True, step - 1)
                rollouts.append(Rollout(prompt, (Turn(prompt.token_ids), answer), group=group, seed=seed))
        for rank in range(2):
            numbers = list(range(rank, len(rollouts), 2))
            write_part(part_file(run_dir, step, rank), step, len(rollouts), numbers, [rollouts[i] for i in numbers])


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material") / "m"
    command = [sys.executable, "tools/make_quickstart.py", str(folder), "--demonstrations", "8", "--train", "8"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    plain = [{name: value for name, value in row.items() if name != "tools"} for row in rows]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    (folder / "config.yaml").write_text(CONFIG)
    record(folder / "recorded")
    return folder


@pytest.fixture(scope="module")
def run(material: Path, run_ranks: Callable[..., list[dict[str, Any]]]) -> Run:
    def start(run_dir: Path, world: int, *overrides: str) -> dict[str, Any]:
        argument = [f"model.path={material}/model", f"data.train={material}/train.jsonl", f"run.dir={run_dir}"]
        argument += [f"rollout.replay={material}/recorded", f"parallel.world_size={world}", *overrides]
        config = str(material / "config.yaml")
        results = run_ranks(world, "tests/checkpoint/ranks_run.py", "", config, *argument, timeout=600.0)
        return results[0] | {"err": "".join(result["err"] for result in results)}  # one of them says it

    return start


@pytest.fixture(scope="module")
def undisturbed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    result = run(folder, 2, "parallel.tp=2", "parallel.ep=2")
    assert result["code"] == 0, result
    return folder


def left(undisturbed: Path, target: Path) -> Path:
    """As if the run had been killed after some steps."""
    shutil.copytree(undisturbed, target)
    shutil.rmtree(target / "export")
    for step in range(SAVED + 1, STEPS + 1):
        shutil.rmtree(target / f"checkpoints/step_{step:06d}")
    lines = (target / "metrics.jsonl").read_text().splitlines()
    (target / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= SAVED))
    return target


def later_steps(run_dir: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    parts = ("actor", "critic", "rollout", "reward")
    actual = [row for row in rows if row["step"] > SAVED and "actor/lr" in row]
    return [{name: value for name, value in row.items() if name.split("/")[0] in parts} for row in actual]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, ()),
        (2, ("parallel.pp=2",)),
        (3, ("placement.critic=2", "placement.actor=0-1", "placement.rollout=0-1", "placement.reward=0-1")),
        (4, ("parallel.tp=2", "parallel.cp=2", "critic.parallel.tp=1", "critic.parallel.cp=1", "critic.parallel.pp=2")),
    ],
    ids=["one rank", "a pipeline", "apart", "more ranks, and a critic in a layout of its own"],
)
def test_a_run_goes_on_in_another_layout_as_it_would_have(
    run: Run, undisturbed: Path, tmp_path: Path, world: int, layout: tuple[str, ...]
) -> None:
    folder = left(undisturbed, tmp_path / "run")
    result = run(folder, world, "run.resume=auto", *layout)
    assert result["code"] == 0, result
    assert f"step_{SAVED:06d} was written in another layout" in result["out"]
    first, second = later_steps(undisturbed), later_steps(folder)
    assert len(first) == len(second) == STEPS - SAVED
    for item, other in zip(first, second, strict=True):
        assert item.keys() == other.keys()
        assert other == pytest.approx(item, rel=1e-6, abs=1e-6)
    weights, others = (load_file(path / "export/model.safetensors") for path in (undisturbed, folder))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert float((others[name] - tensor).norm()) <= 1e-6 * float(tensor.norm()), name


def test_what_real_ranks_saved_is_converted_to_what_they_exported(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = runpy.run_path(str(ROOT / "tools/checkpoints.py"))["main"]
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", "convert", str(undisturbed), str(tmp_path / "out")])
    assert program() == 0
    names = sorted(path.name for path in (undisturbed / "export").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (undisturbed / "export" / name).read_bytes(), name
    critic = ["checkpoints.py", "convert", str(undisturbed), str(tmp_path / "critic"), "--role", "critic"]
    monkeypatch.setattr(sys, "argv", critic)
    assert program() == 0
    assert load_file(tmp_path / "critic/model.safetensors")["score.weight"].any()


def test_other_rows_are_other_data_and_what_is_forced_says_by_what_it_was_written(
    run: Run, undisturbed: Path, material: Path, tmp_path: Path
) -> None:
    """Row 17 of the fault matrix: nothing of the refused start is left in the folder."""
    folder = left(undisturbed, tmp_path / "run")
    lines = (material / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("".join(f"{line}\n" for line in lines[1:] + lines[:1]))
    manifest = folder / f"checkpoints/step_{SAVED:06d}/manifest.json"
    tree = json.loads(manifest.read_text())
    assert len(tree["config"]) == 16 and tree["code"]
    manifest.write_text(json.dumps(tree | {"code": "0123456789abcdef"}))
    before = sorted((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    retained = (material / "train.jsonl").read_bytes()
    try:
        shutil.copy(tmp_path / "train.jsonl", material / "train.jsonl")
        result = run(folder, 1, "run.resume=auto")
        assert result["code"] == 2 and "other training prompts than these" in result["err"], result
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert all(after[path] == content for path, content in before)
        result = run(folder, 1, "run.resume=forced", f"run.num_rollout={SAVED}")
    finally:
        (material / "train.jsonl").write_bytes(retained)
    assert result["code"] == 0, result
    assert f"after step {SAVED}, written by other code (0123456789abcdef, now " in result["out"]
    assert ", written under another configuration (" in result["out"]
