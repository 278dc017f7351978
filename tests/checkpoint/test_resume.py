"""Full runs that are resumed, reconfigured, moved to another layout, and out of disk space: SFT of a tiny MoE."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.checkpoint.disk_space import estimate_space
from megarl.checkpoint.manifest import hash_file
from megarl.config import load_config
from megarl.controllers.controller import load_requirements
from megarl.models.registry import load_hf_config

ROOT = Path(__file__).resolve().parents[2]
RunTraining = Callable[..., dict[str, Any]]
CONFIG = """
algorithm: sft
run: {num_rollout: 2, save_every: 1, keep_checkpoints: 3}
model: {dtype: bfloat16}
data: {prompts_per_step: 8}
rollout: {max_context: 256, max_new_tokens: 64}
actor_optimizer: {lr: 0.01, min_lr: 0.001, schedule: linear, warmup_fraction: 0.0}
track: {progress: false, trackers: []}
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs") / "m"
    command = [sys.executable, "tools/make_quickstart.py", str(folder), "--demonstrations", "120", "--train", "8"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def run(inputs: Path, run_ranks: Callable[..., list[dict[str, Any]]]) -> RunTraining:
    def start(run_dir: Path, *overrides: str, world: int = 1, disk: str = "") -> dict[str, Any]:
        run_overrides = [
            f"model.path={inputs}/model",
            f"data.train={inputs}/sft.jsonl",
            f"run.dir={run_dir}",
            *overrides,
        ]
        config = str(inputs / "config.yaml")
        layout = f"parallel.world_size={world}"
        results = run_ranks(world, "tests/checkpoint/ranks_run.py", disk, config, layout, *run_overrides)
        return results[0] | {"err": "".join(result["err"] for result in results)}  # only one rank reports the error

    return start


@pytest.fixture(scope="module")
def two_rank_run(run: RunTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with tp=2 and ep=2."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    result = run(folder, "parallel.tp=2", "parallel.ep=2", world=2)
    assert result["code"] == 0, result
    return folder


def learning_rates(run_dir: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["actor/lr"]) for line in lines if "actor/lr" in line]


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_run_files_follow_the_umask(two_rank_run: Path) -> None:
    probe = two_rank_run.parent / "probe"
    probe.write_text("")
    expected = probe.stat().st_mode
    files = [path for path in two_rank_run.rglob("*") if path.is_file()]
    assert len(files) > 20 and {path.stat().st_mode for path in files} == {expected}


def test_estimated_space_slightly_exceeds_files(two_rank_run: Path) -> None:
    config = load_config(two_rank_run / "config.yaml")
    planned = estimate_space(load_hf_config(config.model.path), None, config, load_requirements(config))
    for folder, needed in (("checkpoints/step_000002", planned.checkpoint), ("export", planned.export)):
        written = sum(path.stat().st_size for path in (two_rank_run / folder).rglob("*") if path.is_file())
        assert written < needed < 1.1 * written + (5 << 20), folder


def test_resuming_a_finished_run_exports_in_any_layout(run: RunTraining, two_rank_run: Path, tmp_path: Path) -> None:
    shutil.copytree(two_rank_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/export")
    result = run(tmp_path / "run", "run.resume=auto")
    assert result["code"] == 0, result
    assert "step_000002 was written in another layout: random states are seeded again" in result["out"]
    assert "changed, from step 3 on: parallel.tp: 2 -> 1" in result["out"]
    assert learning_rates(tmp_path / "run") == learning_rates(two_rank_run)  # no step was taken
    first, second = (load_file(path / "export/model.safetensors") for path in (two_rank_run, tmp_path / "run"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_resume_with_changed_config_follows_new_lr_schedule(
    run: RunTraining, two_rank_run: Path, tmp_path: Path
) -> None:
    """With n updates, the schedule is linear from lr at 0 to min_lr at n + 1; update k is at k."""
    assert learning_rates(two_rank_run) == [
        (1, pytest.approx(0.001 + 0.009 * 2 / 3)),
        (2, pytest.approx(0.001 + 0.009 * 1 / 3)),
    ]
    folder = tmp_path / "run"
    shutil.copytree(two_rank_run, folder)
    changes = ["run.num_rollout=5", "actor_optimizer.lr=0.004", "run.save_every=2", "rollout.request_timeout=30"]
    result = run(folder, "run.resume=auto", *changes)
    assert result["code"] == 0, result
    assert learning_rates(folder)[2:] == [(step, pytest.approx(0.001 + 0.003 * (6 - step) / 6)) for step in (3, 4, 5)]
    records = [json.loads(line) for line in (folder / "changes.jsonl").read_text().splitlines()]
    assert {record["key"]: (record["step"], record["old"], record["new"]) for record in records} == {
        "actor_optimizer.lr": (3, 0.01, 0.004),
        "parallel.ep": (3, 2, 1),
        "parallel.tp": (3, 2, 1),
        "parallel.world_size": (3, 2, 1),
        "rollout.request_timeout": (3, 600.0, 30.0),
        "run.num_rollout": (3, 2, 5),
        "run.save_every": (3, 1, 2),
    }
    for record in records:
        line = f"changed, from step 3 on: {record['key']}: {record['old']} -> {record['new']}"
        assert line in result["out"] and line in (folder / "log.txt").read_text()
    assert load_config(folder / "config.yaml").actor_optimizer.lr == 0.004

    # Resume once more, from one rank on two data parallel ones.
    result = run(folder, "run.resume=auto", "run.num_rollout=6", *changes[1:], world=2)
    assert result["code"] == 0, result
    assert learning_rates(folder)[5:] == [(6, pytest.approx(0.001 + 0.003 * 1 / 7))]
    assert json.loads((folder / "changes.jsonl").read_text().splitlines()[-1])["step"] == 6

    # A run cannot end before the step that it resumes from.
    result = run(folder, "run.resume=auto", *changes, world=2)
    assert result["code"] == 2 and result["err"].startswith("error: run.num_rollout=5, but "), result


@pytest.mark.parametrize("disk", ["full_in_first_save", "full_in_metadata_of_second_save"])
def test_full_disk_skips_checkpoint_and_training_continues(run: RunTraining, tmp_path: Path, disk: str) -> None:
    folder, failed_step = tmp_path / "run", {"full_in_first_save": 1, "full_in_metadata_of_second_save": 2}[disk]
    result = run(folder, "run.num_rollout=3", "parallel.ep=2", world=2, disk=disk)
    assert (result["code"], result["err"]) == (0, ""), result
    alarm = f"ALARM: could not write checkpoint {folder}/checkpoints/step_00000{failed_step}: No space left on device"
    for text in (result["out"], (folder / "log.txt").read_text()):
        assert text.count(alarm) == 1, text
        assert "earlier checkpoints are intact. Training continues; free disk space" in text
    assert checkpoints(folder) == ["latest", *[f"step_00000{step}" for step in (1, 2, 3) if step != failed_step]]
    assert (folder / "export/model.safetensors").is_file()


def test_no_space_for_last_checkpoint_exports_and_fails(run: RunTraining, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = run(folder, disk="no_space_for_last_checkpoint")
    (line,) = result["err"].splitlines()
    assert result["code"] == 2 and line.startswith("error: could not write checkpoint"), result
    assert "about 5.0 MB are needed, and 1.0 MB are free" in line and "earlier checkpoints are intact" in line
    assert checkpoints(folder) == ["latest", "step_000001"] and (folder / "export/model.safetensors").is_file()


def test_export_waits_for_disk_space(run: RunTraining, tmp_path: Path) -> None:
    result = run(tmp_path / "run", "run.num_rollout=1", disk="no_space_for_export_at_first")
    assert (result["code"], result["err"]) == (0, ""), result
    assert result["out"].count("ALARM: cannot export to ") == 1
    assert "MB are needed, and 0.0 MB are free. Waiting for space, for up to 7200 s" in result["out"]
    assert (tmp_path / "run/export/model.safetensors").is_file() and not (tmp_path / "run/export.tmp").exists()


def test_next_start_exports_after_export_ran_out_of_space(run: RunTraining, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = run(folder, "run.num_rollout=1", "run.storage_timeout_s=5", disk="no_space_for_export")
    (line,) = result["err"].splitlines()
    assert result["code"] == 2 and f"could not export to {folder}/export: " in line, result
    assert (
        f"free disk space and restart with run.resume=auto, from the newest checkpoint, {folder}/checkpoints/" in line
    )
    assert not (folder / "export").exists()
    result = run(folder, "run.num_rollout=1", "run.resume=auto")
    assert result["code"] == 0 and [step for step, _ in learning_rates(folder)] == [1], result
    assert (folder / "export/model.safetensors").is_file()


def test_resume_refuses_checkpoint_of_another_program_or_model(
    run: RunTraining, two_rank_run: Path, tmp_path: Path
) -> None:
    """Both are complete by their manifests."""
    for name in ("host", "model"):
        folder = tmp_path / name
        shutil.copytree(two_rank_run, folder)
        checkpoint = folder / "checkpoints/step_000002"
        tree = json.loads((checkpoint / "manifest.json").read_text())
        if name == "host":
            (checkpoint / "host.json").write_text('{"step": 2, "loader": []}')
            tree["files"]["host.json"] = hash_file(checkpoint / "host.json")._asdict()
        else:
            (checkpoint / "actor").rename(checkpoint / "critic")
            tree["files"] = {file.replace("actor/", "critic/"): entry for file, entry in tree["files"].items()}
        (checkpoint / "manifest.json").write_text(json.dumps(tree))
        result = run(folder, "run.resume=auto")
        (line,) = result["err"].splitlines()
        messages = {"host": "host.json is not of this program", "model": f"{checkpoint}/actor does not fit this model"}
        assert result["code"] == 2 and messages[name] in line, result


def test_resume_skips_damaged_checkpoint_and_logs_it(run: RunTraining, two_rank_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_rank_run, folder)
    newest = folder / "checkpoints/step_000002"
    damaged = next((newest / "actor").glob("__1_*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    result = run(folder, "run.resume=auto", "parallel.tp=2", "parallel.ep=2", world=2)
    assert result["code"] == 0, result
    skipped = f"skipping checkpoint {newest}: actor/{damaged.name} differs from its checksum"
    assert skipped in result["out"] and skipped in (folder / "log.txt").read_text()
    assert f"resumed from {folder}/checkpoints/step_000001 after step 1" in result["out"]
    assert not (folder / "changes.jsonl").exists()
