"""The report of finished runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import Config
from megarl.observe import run_report
from megarl.observe.run_folder import claim_and_begin
from megarl.observe.tracker import Tracker

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    claim_and_begin(folder, dataclasses.replace(Config(), algorithm="grpo"), resume=False).release()
    tracker = Tracker(folder, names=())
    tracker.log(0, {"eval/reward_greedy": 0.0, "eval/reward_sampled": 0.25})
    for step in range(1, 11):
        times = {"time/generate": 3.0, "time/actor_update": 1.0, "time/step": 6.0}
        if step == 10:
            times["time/save"] = 5.0  # a phase only some steps have
        tracker.log(step, {"rollout/reward_mean": step / 10, **times})
    tracker.log(10, {"eval/reward_greedy": 0.96875, "eval/reward_sampled": 0.9})
    return folder


def test_report_shows_progress_time_and_files(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_report.main([str(run_dir)]) == 0
    output = capsys.readouterr().out
    for text in ("grpo", "0.000 -> 0.969", "0.250 -> 0.900", "0.300 -> 0.800", "1.0", str(run_dir / "metrics.jsonl")):
        assert text in output, text
    image = (run_dir / "report.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000


def test_plot_of_several_runs_has_its_own_name(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (shutil.copytree(run_dir, tmp_path / name) for name in ("a", "b", "c"))
    assert run_report.main([str(first)]) == 0
    original = (first / "report.png").read_bytes()
    assert run_report.main([str(first), str(second)]) == run_report.main([str(first), str(second), str(third)]) == 0
    assert (first / "report.png").read_bytes() == original
    images = sorted(file.name for file in first.glob("*.png"))
    assert images == ["report.png", "report_b.png", "report_b_c.png"]
    assert f"plot: {first / 'report_b.png'}" in capsys.readouterr().out


def test_first_and_last_averages_do_not_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rewards, output in (([0.5], "0.500"), ([0.25, 0.75], "0.250 -> 0.750"), ([0.2, 0.9, 0.4], "0.200 -> 0.400")):
        run = tmp_path / str(len(rewards))
        run.mkdir()
        rows = [
            {"step": step, "time": step, "time/step": 1.0, "rollout/reward_mean": reward}
            for step, reward in enumerate(rewards, 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert run_report.main([str(run)]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "first and last" in line]
        assert line.split("steps")[1].strip() == output


def test_phases_sum_to_the_step(run_dir: Path) -> None:
    run = run_report.load_run(run_dir)
    assert run.phases() == pytest.approx({"generate": 3.0, "other": 1.5, "actor_update": 1.0, "save": 0.5})
    assert list(run.phases())[0] == "generate"
    assert run.minutes() == pytest.approx(1.0)


def test_reports_runs_without_evaluation(run_dir: Path, tmp_path: Path) -> None:
    without_eval = tmp_path / "bare"
    without_eval.mkdir()
    (without_eval / "metrics.jsonl").write_text('{"step": 1, "time": 0, "actor/nll": 2.0, "time/step": 1.0}\n')
    command = [sys.executable, "-m", "megarl", "report", str(run_dir), str(without_eval)]
    command += ["--plot", str(tmp_path / "both.png")]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert process.returncode == 0, process.stderr
    assert "bare" in process.stdout and (tmp_path / "both.png").is_file()


@pytest.mark.parametrize("name", ["gone", "empty"])
def test_rejects_folders_without_a_run(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert run_report.main([str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and name in error and error.count("\n") == 1
