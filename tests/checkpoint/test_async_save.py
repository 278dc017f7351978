"""Checkpoints that are written while training goes on, in whole runs: SFT of a tiny MoE on two ranks, three steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., list[dict[str, Any]]]
CONFIG = """
algorithm: sft
run: {num_rollout: 3, save_every: 1, keep_checkpoints: 3}
model: {dtype: bfloat16}
parallel: {world_size: 2, ep: 2}
data: {prompts_per_step: 8}
rollout: {max_context: 256, max_new_tokens: 64}
actor_optimizer: {lr: 0.01, min_lr: 0.001, schedule: linear, warmup_fraction: 0.0}
track: {progress: false, trackers: []}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., list[dict[str, Any]]]) -> Run:
    folder = tmp_path_factory.mktemp("material") / "m"
    command = [sys.executable, "tools/make_quickstart.py", str(folder), "--demonstrations", "120", "--train", "8"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (folder / "config.yaml").write_text(CONFIG)

    def start(run_dir: Path, event: str, *overrides: str) -> list[dict[str, Any]]:
        value = [f"model.path={folder}/model", f"data.train={folder}/sft.jsonl", f"run.dir={run_dir}", *overrides]
        return run_ranks(2, "tests/checkpoint/ranks_async_save.py", event, str(folder / "config.yaml"), *value)

    return start


@pytest.fixture(scope="module")
def undisturbed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose checkpoints are all waited for."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    results = run(folder, "", "run.save_async=false")
    assert [result["code"] for result in results] == [0, 0], results
    return folder


def losses(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["actor/loss"] for line in lines if "actor/loss" in line}


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def hashes(run_dir: Path, step: int) -> dict[str, str]:
    """Of all that a checkpoint has of the model's tensors."""
    tree = json.loads((run_dir / f"checkpoints/step_{step:06d}/manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in tree.items() if name.endswith(".distcp")}


def same_end(run_dir: Path, other: Path) -> bool:
    item, two = (load_file(path / "export/model.safetensors") for path in (run_dir, other))
    return (
        losses(run_dir) == losses(other)
        and item.keys() == two.keys()
        and all(torch.equal(item[name], two[name]) for name in item)
    )


def test_what_is_written_late_is_what_was_there(run: Run, undisturbed: Path, tmp_path: Path) -> None:
    results = run(tmp_path / "run", "late")
    assert [result["code"] for result in results] == [0, 0], results
    assert checkpoints(tmp_path / "run") == ["latest", "step_000001", "step_000002", "step_000003"]
    for step in (1, 2, 3):
        actual = hashes(tmp_path / "run", step)
        assert len(actual) == 2 * 2 and actual == hashes(undisturbed, step)
    assert same_end(tmp_path / "run", undisturbed)


STAGES = {
    "killed_writing": ["latest", "step_000001", "step_000002.tmp"],
    "killed_at_the_manifest": ["latest", "step_000001", "step_000002.tmp"],
    "killed_before_it_has_its_name": ["latest", "step_000001", "step_000002.tmp"],
    "killed_when_it_has": ["latest", "step_000001", "step_000002"],
}


@pytest.mark.parametrize("event", STAGES)
def test_a_rank_that_is_killed_leaves_a_whole_one_and_the_run_goes_on_bitwise(
    run: Run, undisturbed: Path, tmp_path: Path, event: str
) -> None:
    folder = tmp_path / "run"
    codes = [result["code"] for result in run(folder, event)]
    assert -9 in codes and 0 not in codes
    assert checkpoints(folder) == STAGES[event]
    results = run(folder, "", "run.resume=auto")
    assert [result["code"] for result in results] == [0, 0], results
    actual = "step_000002" if "step_000002" in STAGES[event] else "step_000001"
    assert f"resumed from {folder}/checkpoints/{actual} after step" in results[0]["out"]
    assert checkpoints(folder) == ["latest", "step_000001", "step_000002", "step_000003"]
    assert same_end(folder, undisturbed)


def test_a_disk_that_is_full_meanwhile_costs_that_checkpoint(run: Run, undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    results = run(folder, "full")
    assert [result["code"] for result in results] == [0, 0], results
    alarm = f"ALARM: could not write checkpoint {folder}/checkpoints/step_000002: No space left on device"
    assert (folder / "log.txt").read_text().count(alarm) == 1
    assert checkpoints(folder) == ["latest", "step_000001", "step_000003"]
    assert same_end(folder, undisturbed)


def test_who_is_asked_to_stop_has_finished_one_and_written_the_next(
    run: Run, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    results = run(folder, "asked_to_stop", "run.save_every=1")
    assert [result["code"] for result in results] == [85, 85], results
    assert checkpoints(folder) == ["latest", "step_000001", "step_000002"]
    results = run(folder, "", "run.resume=auto")
    assert [result["code"] for result in results] == [0, 0], results
    assert same_end(folder, undisturbed)


def test_a_run_that_fails_meanwhile_does_not_wait_for_others_and_the_next_start_tidies_up(
    run: Run, undisturbed: Path, tmp_path: Path
) -> None:
    """Where all ranks fail alike they make a checkpoint of it first."""
    for event, left, there in (("one_fails", "step_000001.tmp", []), ("all_fail", "step_000001", ["step_000001"])):
        folder = tmp_path / event
        results = run(folder, event)
        assert [result["code"] for result in results] == [1, 1], results
        assert left in checkpoints(folder)
        results = run(folder, "", "run.resume=auto", "run.save_every=0")
        assert [result["code"] for result in results] == [0, 0], results
        assert [name for name in checkpoints(folder) if name != "latest"] == there
        assert same_end(folder, undisturbed)
