"""`view_rollouts` on finished runs."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megarl.observe.rollout_log import part_file, write_part
from megarl.observe.rollout_table import Record
from megarl.types import Prompt, Rollout, Turn

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import view_rollouts  # noqa: E402

pytestmark = pytest.mark.alone


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
    assert view_rollouts.main([str(recorded_run), "--best", "--show", "1"]) == 0
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
    assert view_rollouts.main([str(recorded_run)]) == 0
    output = capsys.readouterr().out
    assert "prompt p  group 2  episode 7  reward 0" in output and "prompt p  group 2  reward 0" in output


def test_prints_a_system_prompt_once(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {1: "system " * 30, 2: "another " * 30, 3: "short "}
    question = ({"role": "user", "content": "What is 1+1?"},)

    def record(number: int, beginning: int) -> Record:
        return Record(number, Rollout(Prompt("p", question), (Turn((beginning,)),), messages=question), None, None)

    def decode(ids: list[int]) -> str:
        return texts[ids[0]] + "What is 1+1?"

    records = [record(number, beginning) for number, beginning in enumerate((1, 1, 2, 3, 3, 1))]
    view_rollouts.print_rollouts(records, "title", decode, Console(soft_wrap=True, width=80))
    output = capsys.readouterr().out
    assert output.count(texts[1]) == 1 and output.count(texts[2]) == 1 and output.count("short What is") == 2
    assert output.count("[210 characters as in rollout 0] What is 1+1?") == 2 and output.count("What is 1+1?") == 6


def test_html_page_escapes_generated_text(recorded_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert view_rollouts.main([str(recorded_run), "--step", "3", "--html", str(page)]) == 0
    text = page.read_text()
    assert "<script>" not in text and "<b>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "truth &lt;b&gt;42&lt;/b&gt;" in text
    assert text.count('<pre class="written">') == 2 and text.count('<pre class="given">') == 2


def test_incomplete_step_is_not_the_last(recorded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part_file(recorded_run, 4, 1).unlink()
    assert view_rollouts.main([str(recorded_run)]) == 0
    assert "step 3: 2 of 2 rollouts" in capsys.readouterr().out
    assert view_rollouts.main([str(recorded_run), "--step", "4"]) == 2
    assert "has 1 of the 2 rollouts of its step, rollout 1 is missing" in capsys.readouterr().err


@pytest.mark.parametrize("config", [None, "model: {path: /nowhere}", "- 1", "model: [", "\udcff"])
def test_shows_ids_without_a_tokenizer(
    recorded_run: Path, config: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded_run / "config.yaml"
    file.unlink() if config is None else file.write_bytes(config.encode("utf-8", "surrogateescape"))
    assert view_rollouts.main([str(recorded_run)]) == 0
    assert "\n1 1\n" in (output := capsys.readouterr().out) and "\n3 4 5\n" in output
    shutil.copytree(recorded_run / "model", recorded_run / "export")
    assert view_rollouts.main([str(recorded_run)]) == 0
    assert "policy &" in capsys.readouterr().out


def test_rejects_a_step_that_was_not_recorded(recorded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert view_rollouts.main([str(recorded_run), "--step", "9"]) == 2
    assert "no rollouts of step 9; it has steps 3 to 4" in capsys.readouterr().err
