"""`megarl try-tool`: calls in the tool's own process, with the policy's errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.environments.try_tool import main

pytestmark = pytest.mark.alone

CALCULATOR = "megarl.environments.ready.calculator:calculator"
MODULE = """
def half(number: float) -> str:
    '''Halves a number.'''
    assert number, "not zero"
    return str(number / 2)


def untyped(a):
    return a
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tried_tools.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def test_prints_schema_and_results(capsys: pytest.CaptureFixture[str]) -> None:
    calls = ["--arguments", '{"expression": "2+3"}', "--arguments", '{"expression": "2*(3+4)"}']
    assert main([CALCULATOR, *calls]) == 0
    output = capsys.readouterr().out
    assert '"description": "Evaluates an arithmetic expression."' in output
    cells = [line.split()[-2:] for line in output.splitlines() if line.strip().startswith('{"expression": ')]
    assert cells == [["ok", "5"], ["ok", "14"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"number": 0}', "not zero"),
        ("{}", "Error: argument number is missing"),
        ('{"number": "two"}', "argument number must be of type number"),
    ],
)
def test_errors_are_those_of_the_policy(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tried_tools:half", "--arguments", arguments]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " error " in line]
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tried_tools:halve", "--arguments", "{}"], "tried_tools has no 'halve'; it has half"),
        (["tried_tools:untyped", "--arguments", "{}"], "rollout.tools: tried_tools:untyped"),
        (["tried_tools:half", "--arguments", "[1]"], "must be a JSON object"),
        (["tried_tools:half"], "--arguments is not given"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1, error
