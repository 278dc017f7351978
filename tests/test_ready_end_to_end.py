"""One run trains a policy in all ready environments: tools, sandboxed mathematics and code, a game and a search. Its
last steps use the adapters for MCP and Harbor."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "sandbox"))

import adapter_tasks  # noqa: E402
from environment_tasks import ENVIRONMENTS, TASKS, write  # noqa: E402
from sync_sandbox import needs_bubblewrap  # noqa: E402
from training_run import ROOT, read_steps, with_host  # noqa: E402

from megarl.observe.rollout_log import read_rollouts  # noqa: E402

pytestmark = pytest.mark.nightly

STEPS, ADAPTERS = 8, 2


def train(config: str, host: str, *overrides: str) -> None:
    command = [sys.executable, "-m", "megarl.train", config, *overrides, "track.progress=false", "run.save_every=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, env=with_host(host))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def warm_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model after SFT on demonstrations and guesses of each task."""
    folder = tmp_path_factory.mktemp("tasks") / "f"
    adapter_tasks.write_folders(folder)
    write(folder, 20 * STEPS, demonstrations=14400, extra_tasks=adapter_tasks.TASKS, extra_rows=20 * ADAPTERS)
    local = [f"run.dir={folder}/sft", f"model.path={folder}/model", f"data.train={folder}/sft.jsonl"]
    train("configs/quickstart_sft.yaml", "", *local, "run.num_rollout=225")
    return folder


@pytest.fixture(scope="module")
def run(warm_up: Path, host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps with rows of the ready environments, then steps with rows of the adapters."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    local = [
        f"run.dir={run_dir}",
        f"model.path={warm_up}/sft/export",
        f"data.train={warm_up}/train.jsonl",
        "data.eval=[]",
    ]
    tools, folders = adapter_tasks.write_servers(run_dir.parent), f"harbor:{warm_up}/harbor"
    rollout = [f"rollout.environments={json.dumps([*ENVIRONMENTS, folders])}", f"rollout.tools={json.dumps(tools)}"]
    rollout += ["rollout.max_turns=7", "data.shuffle=false"]
    steps = [
        f"run.num_rollout={STEPS + ADAPTERS}",
        "data.prompts_per_step=20",
        "run.eval_every=0",
        "rollout.max_context=256",
    ]
    reward = ["algorithm=grpo", "reward.functions=[adapter_tasks:rewards]", "run.export=false", "expect={}"]
    train("configs/quickstart.yaml", host, *local, *rollout, *steps, *reward)
    return run_dir


@needs_bubblewrap
def test_reward_rises_in_every_environment(run: Path) -> None:
    rows = read_steps(run)[:STEPS]
    assert len(rows) == STEPS and all(row["rollout/aborted_frac"] == 0 for row in rows)
    assert all(row["rollout/reward_failed_frac"] == 0 for row in rows if "rollout/reward_failed_frac" in row)
    for name in TASKS:
        result = [row[f"rollout/reward_mean/{name}"] for row in rows if f"rollout/reward_mean/{name}" in row]
        before, after = statistics.fmean(result[:2]), statistics.fmean(result[-2:])
        assert after > before + 0.1, (name, result)


@needs_bubblewrap
def test_trains_two_steps_with_adapters(run: Path) -> None:
    """The policy earns rewards by calling the MCP server's tool and the Harbor task's shell."""
    rows = read_steps(run)[STEPS:]
    assert [row["step"] for row in rows] == [STEPS + 1, STEPS + 2]
    for row in rows:
        assert row["rollout/aborted_frac"] == 0 == row.get("rollout/reward_failed_frac", 0)
        assert math.isfinite(row["actor/grad_norm"]) and row["actor/grad_norm"] > 0
        result = read_rollouts(run, row["step"])
        for name in adapter_tasks.TASKS:
            tool = {"mcp": "add", "harbor": "bash"}[name]
            local = [item for item in result if item.prompt.data_source == name]
            assert len(local) == 160 // len(adapter_tasks.TASKS) and row[
                f"rollout/reward_mean/{name}"
            ] == pytest.approx(statistics.fmean(item.reward for item in local))
            solved = [item for item in local if item.tool_calls > item.tool_errors and item.reward == 1]
            assert solved and any(item.reward == 0 for item in local)  # so there is something to learn
            calls = [
                call["function"]["name"]
                for item in solved
                for message in item.messages
                for call in tool_calls_of(message)
            ]
            assert tool in calls


def tool_calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    return list(message.get("tool_calls") or ())
