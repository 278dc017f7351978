"""What a user sees of finished runs."""

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


def tool(name: str) -> ModuleType:
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
            times["time/save"] = 5.0  # a phase that not every step has
        tracker.log(step, {"rollout/reward_mean": step / 10, **times})
    tracker.log(10, {"eval/reward_greedy": 0.96875, "eval/reward_sampled": 0.9})
    return folder


def test_report_says_before_after_time_and_files(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("report").main([str(run_dir)]) == 0
    shown = capsys.readouterr().out
    for text in ("grpo", "0.000 -> 0.969", "0.250 -> 0.900", "0.300 -> 0.800", "1.0", str(run_dir / "metrics.jsonl")):
        assert text in shown, text
    picture = (run_dir / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_a_picture_of_several_runs_takes_no_other_ones_place(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tool("report")
    first, second, third = (shutil.copytree(run_dir, tmp_path / name) for name in ("a", "b", "c"))
    assert report.main([str(first)]) == 0
    before = (first / "report.png").read_bytes()
    assert report.main([str(first), str(second)]) == report.main([str(first), str(second), str(third)]) == 0
    assert (first / "report.png").read_bytes() == before
    pictures = sorted(file.name for file in first.glob("*.png"))
    assert pictures == ["report.png", "report_b.png", "report_b_c.png"]
    assert f"plot: {first / 'report_b.png'}" in capsys.readouterr().out


def test_first_and_last_steps_do_not_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rewards, shown in (([0.5], "0.500"), ([0.25, 0.75], "0.250 -> 0.750"), ([0.2, 0.9, 0.4], "0.200 -> 0.400")):
        run = tmp_path / str(len(rewards))
        run.mkdir()
        rows = [
            {"step": step, "time": step, "time/step": 1.0, "rollout/reward_mean": item}
            for step, item in enumerate(rewards, 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert tool("report").main([str(run)]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "first and last" in line]
        assert line.split("steps")[1].strip() == shown


def test_phases_add_up_to_the_step(run_dir: Path) -> None:
    run = tool("report").load_run(run_dir)
    assert run.phases() == pytest.approx({"generate": 3.0, "other": 1.5, "actor_update": 1.0, "save": 0.5})
    assert list(run.phases())[0] == "generate"
    assert run.minutes() == pytest.approx(1.0)


def test_runs_without_evaluation_and_a_plot_elsewhere(run_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "time": 0, "actor/nll": 2.0, "time/step": 1.0}\n')
    command = [sys.executable, "tools/report.py", str(run_dir), str(bare), "--plot", str(tmp_path / "both.png")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "bare" in done.stdout and (tmp_path / "both.png").is_file()


@pytest.mark.parametrize("name", ["gone", "empty"])
def test_what_is_no_run_is_one_clear_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert tool("report").main([str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and name in error and error.count("\n") == 1


@pytest.fixture
def with_rollouts(tmp_path: Path) -> Path:
    def rollout(index: int, reward: float) -> Rollout:
        turns = (Turn((1, 1)), Turn((3, 4, 5), (-0.5, -0.25, 0.0), is_action=True, weight_version=7))
        return Rollout(Prompt(f"p{index}", (), ground_truth="<b>42</b>"), turns, reward=reward)

    for step in (3, 4):
        for number in (0, 1):  # of a rank each
            local = [np.full(5, 0.125, np.float32)]
            write_part(part_file(tmp_path, step, number), step, 2, [number], [rollout(number, float(number))], local)
    vocabulary = {"<script>alert(1)</script>": 1, "policy": 3, "&": 4, "\x1b[31mred [bold]x[/bold]": 5, "?": 6}
    model = tmp_path / "model"
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(model)
    (tmp_path / "config.yaml").write_text(f"model: {{path: {model}}}\n")
    return tmp_path


def test_rollouts_in_the_terminal(with_rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("view_rollouts").main([str(with_rollouts), "--best", "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "step 4: 1 of 2 rollouts" in shown and "prompt p1" in shown and "prompt p0" not in shown
    for text in ("reward 1", "advantage +0.125", "turn 0: given, masked, 2 tokens", "weights 7, mean log-prob -0.250"):
        assert text in shown, text
    assert "policy & \\x1b[31mred [bold]x[/bold]" in shown  # neither the terminal nor the display's markup obeys it


def test_branches_say_which_episode_they_are_of(with_rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = Rollout(Prompt("p", ()), (Turn((1,)), Turn((3,), (0.0,), True, 0)), group=2, episode=7)
    write_part(part_file(with_rollouts, 5, 0), 5, 2, [0, 1], [item, dataclasses.replace(item, episode=-1)])
    assert tool("view_rollouts").main([str(with_rollouts)]) == 0
    shown = capsys.readouterr().out
    assert "prompt p  group 2  episode 7  reward 0" in shown and "prompt p  group 2  reward 0" in shown


def test_rollouts_as_a_page_escape_everything(with_rollouts: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert tool("view_rollouts").main([str(with_rollouts), "--step", "3", "--html", str(page)]) == 0
    text = page.read_text()
    assert "<script>" not in text and "<b>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "truth &lt;b&gt;42&lt;/b&gt;" in text
    assert text.count('<pre class="written">') == 2 and text.count('<pre class="given">') == 2


def test_a_step_under_way_is_not_the_last_one(with_rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part_file(with_rollouts, 4, 1).unlink()
    assert tool("view_rollouts").main([str(with_rollouts)]) == 0
    assert "step 3: 2 of 2 rollouts" in capsys.readouterr().out
    assert tool("view_rollouts").main([str(with_rollouts), "--step", "4"]) == 2
    assert "has 1 of the 2 rollouts of its step, rollout 1 is missing" in capsys.readouterr().err


@pytest.mark.parametrize("config", [None, "model: {path: /nowhere}", "- 1", "model: [", "\udcff"])
def test_without_the_tokenizer_ids_are_shown(
    with_rollouts: Path, config: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = with_rollouts / "config.yaml"
    file.unlink() if config is None else file.write_bytes(config.encode("utf-8", "surrogateescape"))
    assert tool("view_rollouts").main([str(with_rollouts)]) == 0
    assert "\n1 1\n" in (shown := capsys.readouterr().out) and "\n3 4 5\n" in shown
    shutil.copytree(with_rollouts / "model", with_rollouts / "export")
    assert tool("view_rollouts").main([str(with_rollouts)]) == 0
    assert "policy &" in capsys.readouterr().out


def test_a_step_that_was_not_recorded_is_named(with_rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("view_rollouts").main([str(with_rollouts), "--step", "9"]) == 2
    assert "no rollouts of step 9; it has steps 3 to 4" in capsys.readouterr().err
