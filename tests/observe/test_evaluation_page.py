"""`docs/evaluation.md`: its commands, options and keys exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import chat
from megarl import eval as evaluation
from megarl.config import describe_keys
from megarl.evaluators import Evaluator

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    \.venv/bin/(.*)$", PAGE, flags=re.MULTILINE)


def test_page_names_existing_options_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    helps = ""
    for program in (evaluation, chat):
        with pytest.raises(SystemExit):
            program.parse_arguments(["--help"])
        helps += capsys.readouterr().out
    others = {"--worst", "--help", "--num_fewshot", "--limit", "--apply_chat_template"}  # other programs'
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", PAGE)) - others <= set(re.findall(r"--[a-z][a-z_-]*", helps))
    keys = {name for name, _ in describe_keys()}
    named = set(re.findall(r"\b(?:run|rollout|parallel|data)\.[a-z_]+\b(?=[=`])", PAGE))
    assert named and named <= keys


def test_page_commands_parse() -> None:
    programs = [command.split()[:2] for command in COMMANDS]
    assert programs == [["python", "tools/prepare_data.py"], *[["megarl", "eval"]] * 4, ["megarl", "chat"]]
    options, lm_eval, inspect, other = (
        evaluation.parse_arguments([word for word in shlex.split(command)[2:] if "[" not in word and "]" not in word])
        for command in COMMANDS[1:5]
    )
    assert options.k == (1, 8) and len(options.data) == 2
    assert lm_eval.evaluator == Evaluator(lm_eval="gsm8k,arc_easy", options=["--num_fewshot", "5"])
    assert inspect.evaluator == Evaluator(inspect="my_task.py", options=["--limit", "100"])
    assert other.evaluator == Evaluator(command="python my_benchmark.py", options=[])


def test_page_names_data_sets_of_prepare_data() -> None:
    process = subprocess.run(
        [sys.executable, "tools/prepare_data.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert COMMANDS[0].split()[2] in process.stdout
