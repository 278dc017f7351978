"""The report of finished runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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


def write_metrics(run: Path, algorithm: str, rows: dict[int, dict[str, float]]) -> Path:
    run.mkdir()
    lines = [json.dumps({"step": step, "time": step, "time/step": 1.0, **values}) for step, values in rows.items()]
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    (run / "config.yaml").write_text(f"algorithm: {algorithm}\n")
    return run


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {step: {"actor/nll": 4.0 / step, "actor/loss": 9.0} for step in range(1, 5)} | {0: {"eval/nll": 5.0}}
    return write_metrics(tmp_path_factory.mktemp("runs") / "warm", "sft", rows)


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {step: {"actor/loss": 0.75 / step, "rewards/accuracy": step / 4} for step in range(1, 3)}
    return write_metrics(tmp_path_factory.mktemp("runs") / "pairs", "dpo", rows | {3: {"eval/loss": 0.125}})


def draw(run_dirs: list[Path]) -> tuple[Axes, list[Line2D]]:
    """Return the axes that a report draws, and their lines that have points."""
    axes = Figure().subplots()
    run_report.plot_curves(axes, [run_report.load_run(run) for run in run_dirs])
    return axes, [line for line in axes.lines if len(line.get_xdata())]


def test_sft_shows_its_nll(sft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_report.main([str(sft)]) == 0
    output = capsys.readouterr().out
    assert "Mean NLL of a token: before -> after" in output and "reward" not in output
    (line,) = [line for line in output.splitlines() if "training, first and last steps" in line]
    assert line.split("steps")[1].strip() == "3.000 -> 1.167"
    axes, lines = draw([sft])
    assert axes.get_title().startswith("NLL of a token") and axes.get_ylabel() == "mean NLL of a token"
    assert list(lines[0].get_ydata()) == [4.0, 2.0, pytest.approx(4 / 3), 1.0] and list(lines[2].get_ydata()) == [5.0]


def test_pairs_show_loss_and_accuracy(dpo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_report.main([str(dpo)]) == 0
    output = capsys.readouterr().out
    assert "Mean loss: before -> after" in output and "reward" not in output
    for name, figures in (
        ("training, first and last steps", "0.750 -> 0.375"),
        ("training accuracy, first and last", "0.250 -> 0.500"),
    ):
        assert f"{name} {figures}" in " ".join(output.split()), name
    axes, lines = draw([dpo])
    assert list(lines[0].get_ydata()) == [0.75, 0.375] and list(lines[2].get_ydata()) == [0.125]
    (second,) = [other for other in axes.figure.axes if other is not axes]
    assert list(second.lines[0].get_ydata()) == [0.25, 0.375]  # smoothed


def test_different_measures_have_rows_of_their_own(
    run_dir: Path, sft: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_report.main([str(run_dir), str(sft), "--plot", str(tmp_path / "both.png")]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Mean" not in words and "Before -> after" in words
    assert "training reward, first and last 0.300 -> 0.800 -" in words
    assert "training NLL of a token, first and last - 3.000 -> 1.167" in words


def test_title_of_a_narrow_table_has_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_report.main([str(write_metrics(tmp_path / "a", "sft", {1: {"actor/nll": 1.0}}))]) == 0
    assert "Seconds a step, by phase" in capsys.readouterr().out


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
