"""Asynchronous checkpoints in full runs: SFT of a tiny MoE on two ranks, three steps."""

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
RunTraining = Callable[..., list[dict[str, Any]]]
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
def run(tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., list[dict[str, Any]]]) -> RunTraining:
    folder = tmp_path_factory.mktemp("material") / "m"
    command = [sys.executable, "tools/make_quickstart.py", str(folder), "--demonstrations", "120", "--train", "8"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (folder / "config.yaml").write_text(CONFIG)

    def start(run_dir: Path, event: str, *overrides: str) -> list[dict[str, Any]]:
        all_overrides = [
            f"model.path={folder}/model",
            f"data.train={folder}/sft.jsonl",
            f"run.dir={run_dir}",
            *overrides,
        ]
        return run_ranks(2, "tests/checkpoint/ranks_async_save.py", event, str(folder / "config.yaml"), *all_overrides)

    return start


@pytest.fixture(scope="module")
def sync_run(run: RunTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that waits for each of its checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "sync_run"
    results = run(folder, "", "run.save_async=false")
    assert [result["code"] for result in results] == [0, 0], results
    return folder


def losses(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["actor/loss"] for line in lines if "actor/loss" in line}


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def hashes(run_dir: Path, step: int) -> dict[str, str]:
    """Return the checksums of the model's files in a checkpoint."""
    tree = json.loads((run_dir / f"checkpoints/step_{step:06d}/manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in tree.items() if name.endswith(".distcp")}


def has_same_result(run_dir: Path, reference_dir: Path) -> bool:
    actual, expected = (load_file(path / "export/model.safetensors") for path in (run_dir, reference_dir))
    return (
        losses(run_dir) == losses(reference_dir)
        and actual.keys() == expected.keys()
        and all(torch.equal(actual[name], expected[name]) for name in actual)
    )


def test_delayed_write_saves_state_of_its_step(run: RunTraining, sync_run: Path, tmp_path: Path) -> None:
    results = run(tmp_path / "run", "delay_writes")
    assert [result["code"] for result in results] == [0, 0], results
    assert checkpoints(tmp_path / "run") == ["latest", "step_000001", "step_000002", "step_000003"]
    for step in (1, 2, 3):
        actual = hashes(tmp_path / "run", step)
        assert len(actual) == 2 * 2 and actual == hashes(sync_run, step)
    assert has_same_result(tmp_path / "run", sync_run)


def test_update_waits_for_copy_of_state(run: RunTraining, sync_run: Path, tmp_path: Path) -> None:
    """Each copy is still running when the next update wants to start, and has the old values."""
    results = run(tmp_path / "run", "delay_copies")
    assert [result["code"] for result in results] == [0, 0], results
    assert not any("before the copy was complete" in result["out"] for result in results)
    for step in (1, 2, 3):
        assert hashes(tmp_path / "run", step) == hashes(sync_run, step)
    assert has_same_result(tmp_path / "run", sync_run)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("time/save_wait", 0.0) > 0] == [2, 3]


CHECKPOINTS_AFTER_KILL = {
    "kill_while_writing": ["latest", "step_000001", "step_000002.tmp"],
    "kill_at_manifest": ["latest", "step_000001", "step_000002.tmp"],
    "kill_before_commit": ["latest", "step_000001", "step_000002.tmp"],
    "kill_after_commit": ["latest", "step_000001", "step_000002"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("event", CHECKPOINTS_AFTER_KILL)
def test_resumes_bitwise_after_rank_is_killed_in_save(
    run: RunTraining, sync_run: Path, tmp_path: Path, event: str
) -> None:
    folder = tmp_path / "run"
    codes = [result["code"] for result in run(folder, event)]
    assert -9 in codes and 0 not in codes
    assert checkpoints(folder) == CHECKPOINTS_AFTER_KILL[event]
    results = run(folder, "", "run.resume=auto")
    assert [result["code"] for result in results] == [0, 0], results
    expected_newest = "step_000002" if "step_000002" in CHECKPOINTS_AFTER_KILL[event] else "step_000001"
    assert f"resumed from {folder}/checkpoints/{expected_newest} after step" in results[0]["out"]
    assert checkpoints(folder) == ["latest", "step_000001", "step_000002", "step_000003"]
    assert has_same_result(folder, sync_run)


def test_full_disk_skips_only_that_checkpoint(run: RunTraining, sync_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    results = run(folder, "disk_full")
    assert [result["code"] for result in results] == [0, 0], results
    alarm = f"ALARM: could not write checkpoint {folder}/checkpoints/step_000002: No space left on device"
    assert (folder / "log.txt").read_text().count(alarm) == 1
    assert checkpoints(folder) == ["latest", "step_000001", "step_000003"]
    assert has_same_result(folder, sync_run)


def test_stop_signal_finishes_pending_save_and_saves_again(run: RunTraining, sync_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    results = run(folder, "stop_signal", "run.save_every=1")
    assert [result["code"] for result in results] == [85, 85], results
    assert checkpoints(folder) == ["latest", "step_000001", "step_000002"]
    results = run(folder, "", "run.resume=auto")
    assert [result["code"] for result in results] == [0, 0], results
    assert has_same_result(folder, sync_run)


@pytest.mark.nightly
def test_failed_run_leaves_partial_save_to_next_start(run: RunTraining, sync_run: Path, tmp_path: Path) -> None:
    """Ranks do not wait for a failed one; if all of them fail, they commit the pending checkpoint first."""
    for event, pending, committed in (
        ("one_rank_fails", "step_000001.tmp", []),
        ("all_ranks_fail", "step_000001", ["step_000001"]),
    ):
        folder = tmp_path / event
        results = run(folder, event)
        assert [result["code"] for result in results] == [1, 1], results
        assert pending in checkpoints(folder)
        results = run(folder, "", "run.resume=auto", "run.save_every=0")
        assert [result["code"] for result in results] == [0, 0], results
        assert [name for name in checkpoints(folder) if name != "latest"] == committed
        assert has_same_result(folder, sync_run)
