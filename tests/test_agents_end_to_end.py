"""Agents in their own processes, with the OpenAI client, train a policy on real engines and Megatron."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from training_run import ROOT, assert_replays, make_folder, read_steps, train

from megarl.observe.rollout_log import read_rollouts

pytestmark = pytest.mark.nightly

BLACK_BOX = f"{sys.executable} {ROOT / 'tests' / 'subprocess_agent.py'}"
AGENTS = ("calculating", "branching", BLACK_BOX)
SPECS = ["example_agents:calculating", "example_agents:branching", f"program:{BLACK_BOX}"]


OVERRIDES = [
    *("algorithm=grpo", "rollout.tools=[]", f"rollout.environments={json.dumps(SPECS)}", "run.save_every=0"),
    *("reward.functions=[sum_reward:even]", "data.shuffle=false"),
]


@pytest.fixture(scope="module")
def run(host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of GRPO on four prompts with four episodes each; the three agents take turns."""
    folder = make_folder(tmp_path_factory.mktemp("agents") / "q", "qwen3_moe")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    agent_rows = [json.dumps({**row, "environment": AGENTS[i % 3], "tools": []}) for i, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("\n".join(agent_rows) + "\n")
    run_dir = folder.parent / "run"
    train(folder, run_dir, *OVERRIDES, host=host)
    return run_dir


def test_trainer_logprobs_match_the_engine(run: Path) -> None:
    rows = read_steps(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout/logprob_diff_mean"] < 1e-5 and row["actor/grad_norm"] > 0  # every weight sync arrived
        assert row["agents/failed"] == row["agents/refused"] == 0 and row["rollout/aborted_frac"] == 0
        assert row["agents/sessions"] == 16 and row["agents/branches"] > 16
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))


def test_records_episodes_with_their_branches(run: Path) -> None:
    result = read_rollouts(run, 1)
    by_agent = {name: [item for item in result if item.prompt.extra["environment"] == name] for name in AGENTS}
    assert {name: len({(item.group, item.episode, item.seed) for item in by_agent[name]}) for name in AGENTS} == {
        "calculating": 8,
        "branching": 4,
        BLACK_BOX: 4,
    }
    assert len(by_agent["branching"]) == 8  # two branches each
    for item in result:
        parts = item.reward_parts
        assert item.reward == pytest.approx(parts["even"] + parts["environment"])
    assert all(item.branch is not None for item in result)
    branches = [(item.branch.number, item.branch.forks) for item in by_agent["branching"] if item.branch is not None]
    assert branches == [(0, 1), (1, 1)] * 4  # in the table, as in `agents/forks`
    for episode in {(item.group, item.episode) for item in by_agent["branching"]}:
        first, last = [item for item in by_agent["branching"] if (item.group, item.episode) == episode]
        assert first.reward == last.reward
        assert sum(turn.is_action for turn in first.turns) == 2 and sum(turn.is_action for turn in last.turns) == 1


def test_replay_has_the_same_branches_and_rewards_bitwise(run: Path) -> None:
    """Rewards of agents are recorded, those of functions are computed again; no agent runs."""
    assert_replays(lambda target, replay: train(run.parent / "q", target, *OVERRIDES, replay), run)
    for step in (1, 2, 3):
        assert read_rollouts(run.with_name("run_replayed"), step) == read_rollouts(run, step)
