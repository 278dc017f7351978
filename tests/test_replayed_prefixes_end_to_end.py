"""Replayed routing and sparse indices of conversations that newer weights continue, with real SGLang and Megatron.

The engine reads the older tokens again, through the experts and keys of its current weights, and records these. So
trainer and engine agree on every token of the current weights, whatever precedes it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from training_run import ONE_RANK, make_folder, read_steps, train

from megarl.observe.rollout_log import read_records

COMMON = [
    *("algorithm=grpo", "kl.apply_to=none", "train.routing_replay=true", "rollout.max_staleness=3"),
    *("actor_optimizer.lr=3e-3", "actor_optimizer.schedule=constant", "actor_optimizer.warmup_fraction=0"),
    *("run.export=false", "run.save_every=0"),
]
OVERSAMPLED = [*ONE_RANK, "rollout.oversample=2", "rollout.concurrency=12"]
ASYNCHRONOUS = [
    *("rollout.asynchronous=true", "placement={actor: 0, rollout: 1}", "parallel.world_size=2"),
    *("parallel.ranks_per_node=2", "parallel.tp=1", "parallel.ep=1", "run.num_rollout=4", "rollout.max_staleness=1"),
    # Generation takes longer than training.
    *("rollout.max_new_tokens=150", "rollout.max_context=400", "rollout.concurrency=3"),
    *("run.num_update=1", "run.ppo_epochs=1", "rollout.verify_weights_every=1"),
]
AGENTS = ("calculating", "branching")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


def assert_current_tokens_agree(run_dir: Path, steps: int) -> int:
    """Check every token of a step's current weights; return how many of them are behind older tokens."""
    assert [row["step"] for row in read_steps(run_dir)] == [*range(1, steps + 1)]
    num_behind = 0
    for step in range(1, steps + 1):
        for record in read_records(run_dir, step, include_trainer_columns=True):
            rollout, trainer = record.rollout, record.trainer_logprobs
            assert trainer is not None and rollout.status != "aborted"
            turns = [turn for turn in rollout.turns if turn.is_action]
            is_action = np.repeat([turn.is_action for turn in rollout.turns], [len(t.token_ids) for t in rollout.turns])
            versions = np.concatenate([turn.token_versions for turn in turns])
            gaps = np.abs(trainer.logprobs[is_action] - np.concatenate([turn.logprobs for turn in turns]))
            is_current = versions == step - 1
            assert gaps[is_current].max(initial=0) < 1e-5, (step, record.number)
            num_behind += int((is_current & np.maximum.accumulate(~is_current)).sum())
    return num_behind


def test_oversampled_conversations_replay_the_newest_weights(folder: Path, host: str, tmp_path: Path) -> None:
    train(folder, tmp_path / "run", *COMMON, *OVERSAMPLED, host=host)
    assert assert_current_tokens_agree(tmp_path / "run", 3) > 0


@pytest.mark.nightly
def test_retracted_requests_replay_the_newest_weights(folder: Path, host: str, tmp_path: Path) -> None:
    train(folder, tmp_path / "run", *COMMON, *ASYNCHRONOUS, host=host)
    assert assert_current_tokens_agree(tmp_path / "run", 4) > 0


def agent_settings(folder: Path, target: Path) -> list[str]:
    """Write the prompts for two agents of several turns to `target`, and return the settings of a run on them."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [{**row, "environment": AGENTS[i % 2], "tools": []} for i, row in enumerate(rows)]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    specs = json.dumps([f"example_agents:{name}" for name in AGENTS])
    return ["rollout.tools=[]", f"rollout.environments={specs}", "rollout.max_new_tokens=60", f"data.train={target}"]


@pytest.mark.nightly
@pytest.mark.parametrize("sync_mode", ["retract", "in_place"])
def test_turns_of_agents_replay_the_newest_weights(folder: Path, host: str, tmp_path: Path, sync_mode: str) -> None:
    settings = [*agent_settings(folder, tmp_path / "train.jsonl"), f"rollout.on_weight_sync={sync_mode}"]
    train(folder, tmp_path / "run", *COMMON, *ASYNCHRONOUS, *settings, host=host)
    assert assert_current_tokens_agree(tmp_path / "run", 4) > 0


@pytest.mark.nightly
def test_oversampled_agents_continue_with_the_newest_weights(folder: Path, host: str, tmp_path: Path) -> None:
    settings = [*agent_settings(folder, tmp_path / "train.jsonl"), "rollout.max_context=400"]
    train(folder, tmp_path / "run", *COMMON, *OVERSAMPLED, *settings, host=host)
    assert assert_current_tokens_agree(tmp_path / "run", 3) > 0
    rows = read_steps(tmp_path / "run")
    assert max(row["rollout/partial_groups"] for row in rows) > 0 and sum(row["agents/failed"] for row in rows) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["oversampled", "asynchronous"])
def test_sparse_indices_are_those_of_the_newest_weights(folder: Path, host: str, tmp_path: Path, mode: str) -> None:
    model = tiny_models.save(tiny_models.deepseek_v32(), tmp_path / "model")
    settings = [f"model.path={model}", "train.sparse_index_replay=true"]
    settings += OVERSAMPLED if mode == "oversampled" else ASYNCHRONOUS
    train(folder, tmp_path / "run", *COMMON, *settings, host=host)
    assert assert_current_tokens_agree(tmp_path / "run", 3 if mode == "oversampled" else 4) > 0
