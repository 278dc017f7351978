"""`megarl try-reward`: rewards of a user's function on rows, and errors as in training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.rewards.try_reward import main, shorten

pytestmark = pytest.mark.alone

MODULE = """
def right(rollout):
    return float(str(rollout.prompt.ground_truth) == rollout.answer)


def parts(rollout):
    return {"reward": 0.5, "parts": {"words": len(rollout.answer.split())}, "turns": [0.25]}


def fails(rollout):
    raise ValueError("no such thing")


async def polite(rollout):
    return "please" in rollout.answer


def text(rollout):
    return "good"


def constant(rollout):
    return 1.0
"""


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "tried_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    rows = [{"prompt": f"{n}+{n}?", "ground_truth": str(2 * n)} for n in range(1, 9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "a.jsonl")


def last_cells(text: str, word: str) -> list[str]:
    return [line.split()[-1] for line in text.splitlines() if word in line and "gives the" not in line]


def test_tries_ground_truth_and_empty_answer(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tried_rewards:right", "--data", data, "--rows", "3"]) == 0
    output = capsys.readouterr().out
    assert last_cells(output, "ground truth: ") == ["1", "1", "1"] and last_cells(output, " empty ") == ["0", "0", "0"]
    assert "right gives the ground truth more than the empty answer in 3 of 3 rows\n" in output
    assert main(["tried_rewards:constant", "--data", data]) == 0
    assert (
        "constant gives the ground truth more than the empty answer in 0 of 5 rows; it may" in capsys.readouterr().out
    )


def test_answers_come_from_the_option_or_a_column(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = ["tried_rewards:right", "tried_rewards:polite"]
    assert main([*functions, "--data", data, "--rows", "1", "--answer", "please: {ground_truth}"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "given: please: 2" in line]
    assert line.split()[-2:] == ["0", "1"]
    row = {"prompt": "1+1?", "ground_truth": "2", "response": "2"}
    (tmp_path / "b.jsonl").write_text(json.dumps(row))
    assert main([*functions, "--data", str(tmp_path / "b.jsonl")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "response: 2" in line]
    assert line.split()[-2:] == ["1", "0"]


def test_adds_turn_rewards_and_prints_parts(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tried_rewards:parts", "--data", data, "--rows", "1", "--answer", "a b c"]) == 0
    assert "0.75 (words 3)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "reason"),
    [("fails", "fails: it raised ValueError: no such thing"), ("text", "text: it returned a str, 'good'; it must")],
)
def test_failures_are_one_line(function: str, reason: str, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"tried_rewards:{function}", "--data", data]) == 1
    output = capsys.readouterr().out
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert reason in line and "(10 of 10 answers)" in line and output.count("failed") == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tried_rewards:rihgt", "--data", "DATA"], "reward.functions: tried_rewards has no 'rihgt'; it has right"),
        (["nowhere:right", "--data", "DATA"], "cannot import nowhere"),
        (["tried_rewards:right", "--data", "none.jsonl"], "none.jsonl"),
        (["tried_rewards:right", "--data", "DATA", "--prompt-key", "question"], "question"),
        (["tried_rewards:right", "--data", "DATA", "--label-key", ""], "neither a ground truth nor a column"),
        (["tried_rewards:right"], "--data"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.replace("DATA", data) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1, error


def test_shortens_long_texts() -> None:
    assert shorten("a\nb") == "a b" and shorten("x" * 61) == "x" * 57 + "..."
