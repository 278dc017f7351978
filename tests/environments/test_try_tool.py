"""`megarl try-tool`: calls in the process of a tool or an environment, with the policy's errors."""

from __future__ import annotations

import json
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


class Machine:
    def reset(self, ground_truth: int) -> str:
        self.target, self.total, self.pulled = ground_truth, 0, False
        return f"Reach {ground_truth}."

    def turn(self, wheel: int) -> str:
        '''Turns the wheel.'''
        if wheel > 9:
            raise ValueError("the wheel broke")
        self.total += wheel
        return f"at {self.total}"

    def pull(self) -> str:
        '''Pulls the lever.'''
        self.pulled = True
        return "clank"

    def reward(self, answer: str, messages: list, turns: list) -> dict:
        parts = {"messages": len(messages), "turns": len(turns), "polite": float(answer == "thanks")}
        return {"reward": float(self.pulled and self.total == self.target), "parts": parts}


class Broken:
    def reset(self) -> None:
        raise ValueError("no board")

    def pull(self) -> str:
        '''Pulls the lever.'''
        return "clank"


async def agent(row, base_url, api_key):
    return 1.0
"""
MACHINE = "tried_tools:Machine"
TURN_AND_PULL = ["--call", "turn", '{"wheel": 3}', "--call", "turn", '{"wheel": 1}', "--call", "pull", "{}"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tried_tools.py").write_text(MODULE)
    rows = [{"prompt": "Play.", "ground_truth": number} for number in (7, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
        (["tried_tools:half", "--call", "half", "{}"], "rollout.environments: tried_tools:half"),
        ([MACHINE, "--arguments", '{"wheel": 1}'], """instead of --arguments write --call turn '{"wheel": 1}'"""),
        ([MACHINE, "--call", "turn", "[1]"], "turn: must be a JSON object"),
        ([MACHINE, *TURN_AND_PULL], """reset of tried_tools:Machine needs the column 'ground_truth': --row"""),
        ([MACHINE, "--row", "1"], "--row 1 is the number of a row of --data"),
        ([MACHINE, "--row", "one"], "must be a whole number"),
        ([MACHINE, "--data", "rows.jsonl", "--row", "2"], "rows.jsonl has no row 2"),
        ([MACHINE, "--data", "rows.jsonl", "--row", "{}"], "pass one of them"),
        (["tried_tools:agent", "--row", "{}"], "tried_tools:agent is an agent"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1, error


@pytest.mark.parametrize(
    ("row", "prompt", "reward"),
    [
        (["--row", '{"ground_truth": 4}'], "try-tool", "1"),
        (["--data", "rows.jsonl"], "Play.", "0"),
        (["--data", "rows.jsonl", "--row", "1"], "Play.", "1"),
    ],
)
def test_plays_an_environment(row: list[str], prompt: str, reward: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MACHINE, *row, *TURN_AND_PULL, "--answer", "thanks"]) == 0
    output = capsys.readouterr().out
    assert f"user: {prompt}\nuser: Reach " in output
    assert output.index('"name": "turn"') < output.index('"name": "pull"')
    assert output.splitlines()[-8:] == [
        'call: turn {"wheel": 3}',
        "result: at 3",
        'call: turn {"wheel": 1}',
        "result: at 4",
        "call: pull {}",
        "result: clank",
        "episode: ended by the policy's answer 'thanks'",
        f"reward: {reward} (messages 9, turns 4, polite 1)",
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("turn", '{"wheel": "3"}', "error: Error: argument wheel must be of type integer"),
        ("turn", '{"wheel": 10}', "error: Error: the wheel broke"),
        ("push", "{}", "error: Error: unknown tool 'push'; available: turn, pull"),
    ],
)
def test_failed_calls_do_not_end_the_episode(
    name: str, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ["--row", '{"ground_truth": 4}']
    assert main([MACHINE, *row, "--call", name, arguments, *TURN_AND_PULL]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(message) for line in lines), lines
    assert lines[-1].startswith("reward: 1 ")


def test_failed_reset_aborts_the_episode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tried_tools:Broken"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("episode: aborted: Broken: ") and "no board" in line
