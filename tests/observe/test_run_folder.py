"""Run folders: claiming, locking, resuming and permissions."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import Config, ConfigError, from_dict, load_config
from megarl.observe.run_folder import claim, claim_and_begin, diff_configs

pytestmark = pytest.mark.alone

CONFIG = from_dict({"actor_optimizer": {"lr": 1e-4}, "rollout": {"tools": ["a:b"], "sglang": {"mem": 1}}})


def with_seed(seed: int) -> Config:
    return dataclasses.replace(CONFIG, run=dataclasses.replace(CONFIG.run, seed=seed))


def test_new_folder_has_config_and_readme(tmp_path: Path) -> None:
    folder = claim_and_begin(tmp_path / "a/b", CONFIG, resume=False)
    assert load_config(folder.path / "config.yaml") == CONFIG
    readme = (folder.path / "README.txt").read_text()
    for name in ("config.yaml", "log.txt", "metrics.jsonl", "logs", "rollouts", "checkpoints", "export", "tensorboard"):
        assert f"\n{name}" in readme
    folder.release()


def test_folder_with_results_rejects_other_runs(tmp_path: Path) -> None:
    claim_and_begin(tmp_path, CONFIG, resume=False).release()
    claim_and_begin(tmp_path, with_seed(5), resume=False).release()  # a start without results does not block others
    claim_and_begin(tmp_path, CONFIG, resume=False).release()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    previous = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match="without a checkpoint from which run.resume=auto could"):
        claim_and_begin(tmp_path, CONFIG, resume=False)
    (tmp_path / "checkpoints/step_000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="set run.resume=auto to continue it"):
        claim_and_begin(tmp_path, CONFIG, resume=False)
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"run\.seed: 1 -> 5.*set run\.dir"):
            claim_and_begin(tmp_path, with_seed(5), resume)
    assert (tmp_path / "config.yaml").read_bytes() == previous
    claim_and_begin(tmp_path, CONFIG, resume=True).release()


def test_finished_run_without_a_checkpoint_does_not_restart(tmp_path: Path) -> None:
    """Finished means exported or, without an export, at the last step; an interrupted run restarts."""
    for name, export in (("a", True), ("b", False)):
        config = dataclasses.replace(CONFIG, run=dataclasses.replace(CONFIG.run, num_rollout=2, export=export))
        resumed = dataclasses.replace(config, run=dataclasses.replace(config.run, num_rollout=9, resume="auto"))
        folder = tmp_path / name
        claim_and_begin(folder, config, resume=False).release()
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        claim(folder, resumed, resume=True).release()
        (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
        if export:
            claim(folder, resumed, resume=True).release()  # interrupted during the export
            (folder / "export").mkdir()
            (folder / "export/config.json").write_text("{}")
        with pytest.raises(
            ConfigError, match=r"finished and without a checkpoint.*run\.resume=auto would start afresh"
        ):
            claim(folder, resumed, resume=True)
        (folder / "checkpoints/step_000002").mkdir(parents=True)
        claim(folder, resumed, resume=True).release()


def test_diff_ignores_keys_without_effect_on_training() -> None:
    other_run = dataclasses.replace(
        CONFIG,
        run=dataclasses.replace(CONFIG.run, resume="auto", dir="elsewhere"),
        track=dataclasses.replace(CONFIG.track, progress=False),
    )
    assert diff_configs(CONFIG, other_run) == []
    changed = dataclasses.replace(CONFIG, rollout=dataclasses.replace(CONFIG.rollout, sglang={}))
    assert list(map(str, diff_configs(CONFIG, changed))) == [
        "rollout.sglang: None -> {}",
        "rollout.sglang.mem: 1 -> None",
    ]


def with_mtp(weight: float) -> Config:
    return dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, mtp_loss_coef=weight))


def test_records_changed_keys_with_their_first_step(tmp_path: Path) -> None:
    claim_and_begin(tmp_path, with_mtp(0.1), resume=False).release()
    (tmp_path / "metrics.jsonl").write_text('{"step": 20}\n')
    previous = (tmp_path / "config.yaml").read_bytes()
    folder = claim(tmp_path, with_mtp(0.3), resume=True)
    assert folder.is_resumed and (tmp_path / "config.yaml").read_bytes() == previous
    (change,) = folder.begin(20)
    folder.release()
    assert str(change) == "train.mtp_loss_coef: 0.1 -> 0.3"
    record = json.loads((tmp_path / "changes.jsonl").read_text())
    assert (record["step"], record["key"], record["old"], record["new"]) == (21, "train.mtp_loss_coef", 0.1, 0.3)
    assert load_config(tmp_path / "config.yaml") == with_mtp(0.3)
    with pytest.raises(ConfigError, match=r"train\.mtp_loss_coef: 0\.3 -> 0\.0"):
        claim(tmp_path, with_mtp(0.0), resume=True)


def test_forced_resume_of_another_run_records_changes(tmp_path: Path) -> None:
    claim_and_begin(tmp_path, CONFIG, resume=False).release()
    (tmp_path / "metrics.jsonl").write_text('{"step": 20}\n')
    other_run = with_seed(5)
    with pytest.raises(ConfigError, match="belongs to another run .*run.seed: 1 -> 5.* or set run.resume=forced"):
        claim(tmp_path, other_run, resume=True)
    forced = dataclasses.replace(other_run, run=dataclasses.replace(other_run.run, resume="forced"))
    assert forced.run.resumes
    folder = claim(tmp_path, forced, resume=True)
    assert [str(change) for change in folder.begin(20)] == ["run.seed: 1 -> 5"]
    folder.release()
    claim(tmp_path, other_run, resume=True).release()  # the folder now belongs to this run


def test_released_claim_leaves_nothing(tmp_path: Path) -> None:
    claim(tmp_path / "a/b", CONFIG, resume=True).release()
    assert not (tmp_path / "a").exists()


def test_two_jobs_cannot_claim_one_folder(tmp_path: Path) -> None:
    script = "import sys; from megarl.observe.run_folder import claim_and_begin; from megarl.config import Config\n"
    script += "folder = claim_and_begin(sys.argv[1], Config(), False); print('held', flush=True); sys.stdin.read()"
    other_run = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other_run.stdout is not None and other_run.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in use by process {other_run.pid} on "):
            claim_and_begin(tmp_path, Config(), resume=True)
    finally:
        other_run.kill()  # like a lost machine: the claim ends with the process
        other_run.wait()
    claim_and_begin(tmp_path, Config(), resume=True).release()


def test_rejects_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run folder .*file/run.*set run.dir"):
        claim_and_begin(tmp_path / "file/run", CONFIG, resume=False)
    full_disk = tmp_path / "full"
    full_disk.mkdir()
    (full_disk / ".config.yaml.tmp").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="No space left"):
        claim_and_begin(full_disk, CONFIG, resume=False)
    assert not (full_disk / "config.yaml").exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o377])
def test_run_folder_is_private_for_any_umask(tmp_path: Path, umask: int) -> None:
    previous = os.umask(umask)
    try:
        folder = claim_and_begin(tmp_path / f"runs{umask}" / "a", CONFIG, resume=False)
        (folder.path / "rollouts").mkdir()
    finally:
        os.umask(previous)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.release()


def test_existing_folder_is_made_private_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    folder = claim_and_begin(tmp_path, CONFIG, resume=False)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    folder.release()
    tmp_path.chmod(0o750)  # opened to the group by its owner
    claim_and_begin(tmp_path, CONFIG, resume=True).release()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750


def test_rejects_unwritable_checkpoint_folder_at_start(tmp_path: Path) -> None:
    saves = dataclasses.replace(CONFIG, run=dataclasses.replace(CONFIG.run, save_every=1))
    claim_and_begin(tmp_path, saves, resume=False).release()
    (tmp_path / "checkpoints" / ".probe").mkdir(parents=True)  # blocks even root
    with pytest.raises(ConfigError, match=r"cannot write to run folder \S+/checkpoints: Is a directory; free space"):
        claim(tmp_path, saves, resume=True)
    claim(tmp_path, CONFIG, resume=True).release()  # writes no checkpoints
