"""`mismatch`: table, worst tokens and JSON of a run folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from megarl.observe.rollout_log import part_file, write_part
from megarl.observe.rollout_table import TrainerLogprobs
from megarl.types import Prompt, Rollout, Turn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import mismatch  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps; the second has trainer logprobs and a turn by older weights."""
    for step in (1, 2, 3):
        turns = Turn((1, 2)), Turn((7, 8), (-1.0, -2.0), True, 1), Turn((3,)), Turn((9,), (-1.0,), True, 0)
        trainer = TrainerLogprobs(np.array([0, 0, -1, -2.25, 0, -2], np.float32)) if step == 2 else None
        rollout = Rollout(Prompt("odd \x1b[31m", ()), turns)
        write_part(part_file(tmp_path / "r", step, 0), step, 1, [0], [rollout], None, "", [trainer])
    return tmp_path / "r"


def test_reports_the_last_step_with_trainer_logprobs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mismatch.main([str(run), "--worst", "2"]) == 0
    output = capsys.readouterr().out
    assert "step 2: 3 tokens of 1 rollouts" in output and "routing was not measured apart" in output
    rows = [line.split() for line in output.splitlines()]
    assert ["staleness", "1", "1.00e+00", "1.00e+00", "1.00e+00", "80.0%"] in rows
    assert ["all", "3", "4.17e-01", "1.00e+00", "1.00e+00"] in rows
    assert "token 5: gap -1.000e+00, engine -1.0000, trainer -2.0000: staleness, 1 versions behind" in output
    assert "1 2 7 8 3 >>9<<" in output and "\x1b" not in output


def test_reports_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mismatch.main([str(run), "--step", "2", "--worst", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["step"], result["tokens"], result["routing_measured"]) == (2, 3, False)
    assert [cause["name"] for cause in result["causes"]] == ["staleness", "kernels and cache, first turn", "all"]
    assert result["worst"][0]["text"] == "9" and result["worst"][0]["rollout"] == 0


def test_compares_samples_with_and_without_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two samples with a common prefix, the second with cached tokens."""
    rollouts = [
        Rollout(Prompt("p", ()), (Turn((1, 2)), Turn((7, 8 + n), (-1.0 - n / 4, -2.0), True, 0, cached_tokens=n)))
        for n in range(2)
    ]
    trainer = [TrainerLogprobs(np.array([0, 0, -1, -2.25], np.float32)) for _ in rollouts]
    write_part(part_file(tmp_path / "r", 1, 0), 1, 2, [0, 1], rollouts, None, "", trainer)
    assert mismatch.main([str(tmp_path / "r"), "--worst", "1"]) == 0
    output = capsys.readouterr().out
    assert "kernels, nothing cached" in output and "cache, and kernels" in output
    row = next(line for line in output.splitlines() if line.startswith("cached for one, not for the other"))
    assert row.split()[-4:] == ["1", "2.50e-01", "2.50e-01", "2.50e-01"]
    assert mismatch.main([str(tmp_path / "r"), "--worst", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in result["twins"]] == ["cached for one, not for the other"]
    assert [item["cached"] for item in result["worst"]] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "no run folder"),
        (["r", "--step", "9"], "has no rollouts of step 9; it has steps 1 to 3"),
        (["r", "--step", "3"], "has no log-probs of the trainer for step 3: the trainer looks every"),
        (["r", "--worst", "-1"], "--worst"),
        (["r/rollouts"], "has no recorded rollouts"),
    ],
)
def test_rejects_runs_without_the_requested_data(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    assert mismatch.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
