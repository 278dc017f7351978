"""Tutorials run from their own text, and end as they say: the number game, and each night one that continues it."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from nights import cases_of_this_night  # noqa: E402
from pages import ROOT  # noqa: E402
from training_run import read_metrics, read_steps  # noqa: E402
from tutorials import make_checkout, run_dry_runs, run_tutorial  # noqa: E402

from megarl.observe.rollout_log import read_rollouts  # noqa: E402

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

TUTORIALS = ROOT / "docs/tutorials"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which the number game has been trained; other tutorials continue from it."""
    folder = make_checkout(tmp_path_factory.mktemp("tutorials") / "megarl")
    run_tutorial(TUTORIALS / "number_game.md", folder)
    return folder


def test_number_game_is_learned(checkout: Path) -> None:
    sft = [row for row in read_metrics(checkout / "runs/game/sft") if "actor/nll" in row]
    assert sft[0]["actor/nll"] > 5 and sft[-1]["actor/nll"] < 0.5
    rows = read_metrics(checkout / "runs/game/grpo")
    greedy = [row["eval/reward_greedy"] for row in rows if "eval/reward_greedy" in row]
    assert len(greedy) == 3 and greedy[-1] > greedy[0] + 0.15, greedy
    steps = [row["rollout/reward_mean"] for row in read_steps(checkout / "runs/game/grpo")]
    assert statistics.fmean(steps[-3:]) > statistics.fmean(steps[:3]) + 0.1, steps
    result = json.loads((checkout / "runs/game/after/eval.json").read_text())
    assert result["sources"]["eval"]["prompts"] == 90 and result["sources"]["eval"]["reward"]["value"] > greedy[0]
    assert (checkout / "runs/game/grpo/view.html").is_file()


def test_number_game_fits_the_page(checkout: Path) -> None:
    """The environment and the data script together have about 60 lines."""
    lines = [len((checkout / name).read_text().splitlines()) for name in ("my_game.py", "my_game_data.py")]
    assert sum(lines) < 70


def check_agent(checkout: Path) -> None:
    run_tutorial(TUTORIALS / "agent.md", checkout)
    steps = read_steps(checkout / "runs/game/agent")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    (program,) = read_steps(checkout / "runs/game/program")
    for row, episodes in [*((row, 64) for row in steps), (program, 8)]:
        assert row["agents/sessions"] == row["agents/branches"] == episodes and row["agents/failed"] == 0
        assert row["rollout/logprob_diff_mean"] < 1e-5 and row["actor/grad_norm"] > 0
    assert any(item.tool_calls > 1 for item in read_rollouts(checkout / "runs/game/agent", 4))


def check_reward_model(checkout: Path) -> None:
    run_tutorial(TUTORIALS / "reward_model.md", checkout)
    accuracy = [
        row["eval/accuracy"] for row in read_metrics(checkout / "runs/game/reward_model") if "eval/accuracy" in row
    ]
    assert accuracy[-1] > 0.9
    steps = read_steps(checkout / "runs/game/ppo")
    for name in ("reward/model", "reward/environment"):
        result = [row[name] for row in steps]
        assert statistics.fmean(result[-2:]) > statistics.fmean(result[:2]), (name, result)
    assert all(row["rollout/reward_mean"] == pytest.approx(row["reward/model"]) for row in steps)


def check_mismatch(checkout: Path) -> None:
    output = run_tutorial(TUTORIALS / "mismatch.md", checkout)
    means = [float(text) for text in re.findall(r"^all +[\d,]+ +(\S+)", output, re.MULTILINE)]
    assert len(means) == 2 and means[0] < 1e-5 < 1e-4 < means[1], means
    assert re.search(r"^routing +[\d,]+", output, re.MULTILINE)
    assert (checkout / "runs/game/both.html").is_file()


CONTINUE = {"agent": check_agent, "reward_model": check_reward_model, "mismatch": check_mismatch}
"""Tutorials that begin with the number game's results."""


@pytest.mark.parametrize("name", cases_of_this_night(list(CONTINUE), nights=3))
def test_tutorial_ends_as_it_says(name: str, checkout: Path) -> None:
    CONTINUE[name](checkout)


def test_one_gpu_to_slurm_checks_every_layout(tmp_path: Path) -> None:
    output = run_tutorial(TUTORIALS / "one_gpu_to_slurm.md", make_checkout(tmp_path / "megarl"))
    assert output.count("the configuration is valid") >= 5


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the quickstart's data and an untrained model in place of its warmed-up one."""
    folder = make_checkout(tmp_path_factory.mktemp("tasks") / "megarl")
    command = [".venv/bin/python", "tools/make_quickstart.py", "runs/quickstart", "--demonstrations", "64"]
    subprocess.run(command, cwd=folder, check=True, timeout=600, env=dict(os.environ, PYTHONPATH=str(ROOT)))
    (folder / "runs/quickstart/sft").mkdir()
    (folder / "runs/quickstart/sft/export").symlink_to(folder / "runs/quickstart/model")
    return folder


@pytest.mark.parametrize("name", ["model", "reward", "environment", "agent", "algorithm", "cluster"])
def test_task_pages_have_valid_configurations(name: str, quickstart: Path) -> None:
    overrides = ["model.path=runs/quickstart/model", "rollout.max_context=2048"] if name == "model" else []
    output = run_dry_runs(ROOT / f"docs/tasks/my_{name}.md", quickstart, *overrides)
    assert output.count("the configuration is valid") == 1
