"""`report` and `view_rollouts` on finished runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megarl.config import Config
from megarl.observe.rollout_log import part_file, write_part
from megarl.observe.run_folder import claim_and_begin
from megarl.observe.tracker import Tracker
from megarl.types import Prompt, Rollout, Turn

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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
    assert load_tool("report").main([str(run_dir)]) == 0
    output = capsys.readouterr().out
    for text in ("grpo", "0.000 -> 0.969", "0.250 -> 0.900", "0.300 -> 0.800", "1.0", str(run_dir / "metrics.jsonl")):
        assert text in output, text
    image = (run_dir / "report.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000


def test_plot_of_several_runs_has_its_own_name(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = load_tool("report")
    first, second, third = (shutil.copytree(run_dir, tmp_path / name) for name in ("a", "b", "c"))
    assert report.main([str(first)]) == 0
    original = (first / "report.png").read_bytes()
    assert report.main([str(first), str(second)]) == report.main([str(first), str(second), str(third)]) == 0
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
        assert load_tool("report").main([str(run)]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "first and last" in line]
        assert line.split("steps")[1].strip() == output


def test_phases_sum_to_the_step(run_dir: Path) -> None:
    run = load_tool("report").load_run(run_dir)
    assert run.phases() == pytest.approx({"generate": 3.0, "other": 1.5, "actor_update": 1.0, "save": 0.5})
    assert list(run.phases())[0] == "generate"
    assert run.minutes() == pytest.approx(1.0)


def test_reports_runs_without_evaluation(run_dir: Path, tmp_path: Path) -> None:
    without_eval = tmp_path / "bare"
    without_eval.mkdir()
    (without_eval / "metrics.jsonl").write_text('{"step": 1, "time": 0, "actor/nll": 2.0, "time/step": 1.0}\n')
    command = [sys.executable, "tools/report.py", str(run_dir), str(without_eval), "--plot", str(tmp_path / "both.png")]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert process.returncode == 0, process.stderr
    assert "bare" in process.stdout and (tmp_path / "both.png").is_file()


@pytest.mark.parametrize("name", ["gone", "empty"])
def test_rejects_folders_without_a_run(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert load_tool("report").main([str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and name in error and error.count("\n") == 1


@pytest.fixture
def recorded_run(tmp_path: Path) -> Path:
    def rollout(index: int, reward: float) -> Rollout:
        turns = (Turn((1, 1)), Turn((3, 4, 5), (-0.5, -0.25, 0.0), is_action=True, weight_version=7))
        return Rollout(Prompt(f"p{index}", (), ground_truth="<b>42</b>"), turns, reward=reward)

    for step in (3, 4):
        for number in (0, 1):  # one per rank
            advantages = [np.full(5, 0.125, np.float32)]
            write_part(
                part_file(tmp_path, step, number), step, 2, [number], [rollout(number, float(number))], advantages
            )
    vocabulary = {"<script>alert(1)</script>": 1, "policy": 3, "&": 4, "\x1b[31mred [bold]x[/bold]": 5, "?": 6}
    model = tmp_path / "model"
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(model)
    (tmp_path / "config.yaml").write_text(f"model: {{path: {model}}}\n")
    return tmp_path


def test_shows_rollouts_in_the_terminal(recorded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_tool("view_rollouts").main([str(recorded_run), "--best", "--show", "1"]) == 0
    output = capsys.readouterr().out
    assert "step 4: 1 of 2 rollouts" in output and "prompt p1" in output and "prompt p0" not in output
    for text in (
        "reward 1",
        "advantage +0.125",
        "turn 0: prompt or tool result, not trained on, 2 tokens",
        "weight version 7, mean log-prob -0.250",
    ):
        assert text in output, text
    assert "policy & \\x1b[31mred [bold]x[/bold]" in output  # neither escape codes nor markup take effect


def test_shows_the_episode_of_a_branch(recorded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    branch = Rollout(Prompt("p", ()), (Turn((1,)), Turn((3,), (0.0,), True, 0)), group=2, episode=7)
    write_part(part_file(recorded_run, 5, 0), 5, 2, [0, 1], [branch, dataclasses.replace(branch, episode=-1)])
    assert load_tool("view_rollouts").main([str(recorded_run)]) == 0
    output = capsys.readouterr().out
    assert "prompt p  group 2  episode 7  reward 0" in output and "prompt p  group 2  reward 0" in output


def test_html_page_escapes_generated_text(recorded_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert load_tool("view_rollouts").main([str(recorded_run), "--step", "3", "--html", str(page)]) == 0
    text = page.read_text()
    assert "<script>" not in text and "<b>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "truth &lt;b&gt;42&lt;/b&gt;" in text
    assert text.count('<pre class="written">') == 2 and text.count('<pre class="given">') == 2


def test_incomplete_step_is_not_the_last(recorded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part_file(recorded_run, 4, 1).unlink()
    assert load_tool("view_rollouts").main([str(recorded_run)]) == 0
    assert "step 3: 2 of 2 rollouts" in capsys.readouterr().out
    assert load_tool("view_rollouts").main([str(recorded_run), "--step", "4"]) == 2
    assert "has 1 of the 2 rollouts of its step, rollout 1 is missing" in capsys.readouterr().err


@pytest.mark.parametrize("config", [None, "model: {path: /nowhere}", "- 1", "model: [", "\udcff"])
def test_shows_ids_without_a_tokenizer(
    recorded_run: Path, config: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded_run / "config.yaml"
    file.unlink() if config is None else file.write_bytes(config.encode("utf-8", "surrogateescape"))
    assert load_tool("view_rollouts").main([str(recorded_run)]) == 0
    assert "\n1 1\n" in (output := capsys.readouterr().out) and "\n3 4 5\n" in output
    shutil.copytree(recorded_run / "model", recorded_run / "export")
    assert load_tool("view_rollouts").main([str(recorded_run)]) == 0
    assert "policy &" in capsys.readouterr().out


def test_rejects_a_step_that_was_not_recorded(recorded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_tool("view_rollouts").main([str(recorded_run), "--step", "9"]) == 2
    assert "no rollouts of step 9; it has steps 3 to 4" in capsys.readouterr().err
