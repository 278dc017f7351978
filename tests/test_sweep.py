"""Sweeps: grids, searches, tables, and what a second command continues. Trials are played by a fake trainer."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl import sweep
from megarl.config import ConfigError
from megarl.sweep import Range, Sweep, list_trials, parse_grid, parse_search, split_values


def write_config(folder: Path) -> str:
    file = folder / "my.yaml"
    file.write_text("algorithm: grpo\nparallel: {world_size: 1}\n")
    return str(file)


class FakeTrainer:
    """Plays trials and sbatch: the result is `score(overrides)`; a trial without one fails with exit status 2."""

    def __init__(self, score: Callable[[dict[str, str]], float | None]) -> None:
        self.score, self.commands = score, list[list[str]]()

    def __call__(self, command: Sequence[str]) -> int:
        self.commands.append(list(command))
        values = dict(text.split("=", 1) for text in command[4:])
        folder = Path(values["run.dir"])
        folder.mkdir(exist_ok=True)
        result = self.score(values)
        if result is None:
            return 2
        rows = [
            {"step": step, "time": 1.0, "rollout/reward_mean": result + step / 100 - 0.03} for step in (1, 2, 3, 4, 5)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = f"2026-01-01 10:00:00  run folder {folder}\n2026-01-01 10:00:01  done: 5 steps\n"
        (folder / "log.txt").write_text(lines)
        return 0


def run(arguments: Sequence[str], trainer: FakeTrainer) -> int:
    def make(*settings: Any) -> Sweep:
        job = Sweep(*settings)
        job._train = job._sbatch = trainer  # type: ignore[assignment]
        return job

    return sweep.sweep(sweep.parse(arguments), make)


def read_table(folder: Path) -> list[list[str]]:
    with (folder / "sweep.csv").open() as file:
        return list(csv.reader(file))


def test_values_are_split_outside_of_lists_and_quotes() -> None:
    assert split_values("1e-6, 3e-6") == ["1e-6", "3e-6"]
    assert split_values("[a,b],{x: 1,y: 2},'c,d'") == ["[a,b]", "{x: 1,y: 2}", "'c,d'"]


def test_grid_has_all_combinations_the_last_key_fastest() -> None:
    trials = list_trials(parse_grid(["a.b=1,2", "c=x,y"]))
    assert [trial.name for trial in trials] == ["0000", "0001", "0002", "0003"]
    assert [trial.overrides() for trial in trials][1:3] == [["a.b=1", "c=y"], ["a.b=2", "c=x"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [("a", "write section.key=value"), ("a=1,", "write section.key=value"), ("a=1,1", "once"), ("=1", "write section")],
)
def test_invalid_grids_are_told(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_grid([text])


def test_grid_has_a_limit() -> None:
    values = ",".join(map(str, range(101)))
    with pytest.raises(ConfigError, match="10201 combinations"):
        parse_grid([f"a={values}", f"b={values}"])


def test_search_reads_intervals_and_choices() -> None:
    texts = ["actor_optimizer.lr=log:1e-7..1e-5", "run.num_update=1..8", "kl.coef=0..1", "algorithm=grpo,ppo"]
    rate, updates, coef, algorithm = parse_search(texts).values()
    assert rate == Range(1e-7, 1e-5, True, False) and updates == Range(1.0, 8.0, False, True)
    assert coef == Range(0.0, 1.0, False, False) and algorithm == ["grpo", "ppo"]


@pytest.mark.parametrize(
    "text", ["a", "a=log:0..1", "a=log:5", "a=3..1", "a=x..y", "a=nan..1", "a=", "run.num_update=1..2.5"]
)
def test_invalid_searches_are_told(text: str) -> None:
    with pytest.raises(ConfigError, match="--search"):
        parse_search([text])


def test_grid_runs_in_turn_and_the_table_has_the_best_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"0": 0.25, "0.001": None, "0.01": 0.75}
    trainer = FakeTrainer(lambda values: scores[values["kl.coef"]])
    folder = tmp_path / "runs"
    arguments = [write_config(tmp_path), "--grid", "kl.coef=0,0.001,0.01", f"run.dir={folder}", "run.seed=3"]
    assert run(arguments, trainer) == 1, "a trial failed"
    assert trainer.commands[0][4:] == ["run.seed=3", "kl.coef=0", f"run.dir={folder}/0000", "run.resume=auto"]
    header, *rows = read_table(folder)
    assert header == ["trial", "kl.coef", "result", "state"]
    assert [row[0] for row in rows] == ["0002", "0000", "0001"] and rows[2][2:] == ["", "failed, exit 2"]
    assert [float(row[2]) for row in rows[:2]] == pytest.approx([0.75, 0.25]), "the mean of the last five steps"
    # The same command repeats what has failed, and nothing else.
    scores["0.001"] = 0.5
    trainer.commands.clear()
    assert run(arguments, trainer) == 0 and len(trainer.commands) == 1
    assert [row[0] for row in read_table(folder)[1:]] == ["0002", "0001", "0000"]
    assert sweep.main(["--table", str(folder), "--metric", "rollout/reward_mean"]) == 0
    assert "0.75" in capsys.readouterr().out


def test_other_sweep_in_the_folder_is_told(tmp_path: Path) -> None:
    trainer = FakeTrainer(lambda values: 0.0)
    config, folder = write_config(tmp_path), tmp_path / "runs"
    assert run([config, "--grid", "kl.coef=0", f"run.dir={folder}"], trainer) == 0
    with pytest.raises(ConfigError, match="has another sweep"):
        run([config, "--grid", "kl.coef=0,1", f"run.dir={folder}"], trainer)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(ConfigError, match="is not empty and has no sweep"):
        run([config, "--grid", "kl.coef=0", f"run.dir={tmp_path}/other"], trainer)


def test_invalid_combination_is_told_before_anything_starts(tmp_path: Path) -> None:
    trainer = FakeTrainer(lambda values: 0.0)
    arguments = [write_config(tmp_path), "--grid", "kl.coeff=0,1", f"run.dir={tmp_path}/runs"]
    with pytest.raises(ConfigError, match="kl.coef"):
        run(arguments, trainer)
    assert trainer.commands == [] and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a configuration file"),
        (["my.yaml"], "by --grid or by --search"),
        (["my.yaml", "--search", "a=1..2", "--sbatch", ""], "--sbatch is for --grid"),
    ],
)
def test_usage_is_told(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep.parse(arguments)


def interrupt(values: dict[str, str]) -> float:
    raise KeyboardInterrupt


def test_interrupted_grid_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = FakeTrainer(interrupt)
    arguments = [write_config(tmp_path), "--grid", "kl.coef=0,1", f"run.dir={tmp_path}/runs"]
    with pytest.raises(KeyboardInterrupt):
        run(arguments, trainer)
    assert len(trainer.commands) == 1 and "the same command continues" in capsys.readouterr().err
    trainer.score = lambda values: 0.5
    assert run(arguments, trainer) == 0 and len(trainer.commands) == 3


def test_interrupted_trial_has_time_to_save(tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches the sweep and its trial."""
    trial = (
        "import pathlib, signal, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def save(*_):\n    time.sleep(1.5)\n    (folder / 'saved').touch()\n    sys.exit(85)\n"
        "signal.signal(signal.SIGINT, save)\n(folder / 'ready').touch()\ntime.sleep(60)"
    )
    program = f"from megarl import sweep\nimport sys\nsweep.run_to_end([sys.executable, '-c', {trial!r}])"
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stderr=subprocess.DEVNULL)
    for _ in range(1200):
        if (tmp_path / "ready").exists():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) != 0 and (tmp_path / "saved").exists()


def test_slurm_tasks_have_their_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sbatch(FakeTrainer):
        def __call__(self, command: Sequence[str], **options: Any) -> Any:
            self.commands.append(list(command))
            assert options["env"]["MEGARL_SWEEP"] == str(tmp_path / "runs")
            return subprocess.CompletedProcess(command, 0, "Submitted batch job 7\n", "")

    sbatch = Sbatch(lambda values: 0.0)
    config = write_config(tmp_path)
    arguments = [config, "--grid", "kl.coef=0,1", f"run.dir={tmp_path}/runs", "--sbatch", "--nodes=2 --time=1:00:00"]
    assert run(arguments, sbatch) == 0
    options = ["--nodes=2", "--time=1:00:00"]
    assert sbatch.commands == [["sbatch", "--array=0,1", *options, "slurm/ppo_moe.sh", config]]
    lines = (tmp_path / "runs/0001.overrides").read_text().splitlines()
    assert lines == ["kl.coef=1", f"run.dir={tmp_path}/runs/0001", "run.resume=auto"]
    with pytest.raises(ConfigError, match="start it from the project's folder"):
        monkeypatch.chdir(tmp_path)
        run(arguments, sbatch)


def test_search_finds_the_best_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if folder_of_packages := os.environ.get("MEGARL_TRACKERS"):  # .ci/run installs Optuna there
        monkeypatch.setattr(sys, "path", [*sys.path, folder_of_packages])
    pytest.importorskip("optuna")
    trainer = FakeTrainer(lambda values: -abs(float(values["kl.coef"]) - 0.3))
    folder = tmp_path / "runs"
    arguments = [write_config(tmp_path), "--search", "kl.coef=0..1", f"run.dir={folder}", "--trials"]
    assert run([*arguments, "12"], trainer) == 0 and len(trainer.commands) == 12
    best = read_table(folder)[1]
    assert abs(float(best[1]) - 0.3) < 0.15
    trainer.score = interrupt
    with pytest.raises(KeyboardInterrupt):
        run([*arguments, "15"], trainer)
    interrupted = trainer.commands[-1][4]
    trainer.score = lambda values: 0.0
    assert run([*arguments, "15"], trainer) == 0 and len(trainer.commands) == 16, "the study goes on"
    assert trainer.commands[13][4] == interrupted
