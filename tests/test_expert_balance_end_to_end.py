"""Experts of an engine that weight syncs place by their measured load, with copies, on the real SGLang and Megatron."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from training_run import ENVIRONMENT, make_folder, read_steps, train

from megarl.models.registry import load_hf_config
from megarl.models.routing import routing_shape
from megarl.observe.rollout_log import read_records
from megarl.reshard.plan.expert_placement import imbalance, initial_placement
from megarl.workers.expert_balance import count_tokens

pytestmark = pytest.mark.nightly

SETTINGS = (
    *("parallel.world_size=2", "parallel.ranks_per_node=2", "parallel.tp=1", "parallel.ep=2"),
    *("rollout.tp=2", "rollout.ep=2", "train.routing_replay=true", "rollout.verify_weights_every=1"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=32", "run.export=false"),
    *("algorithm=grpo", "kl.apply_to=none", "run.keep_checkpoints=5"),
    *("rollout.num_redundant_experts=2", "rollout.rebalance_experts_every=1"),
    "roles={rollout: {worker: faulty_rollout_worker:FaultyRolloutWorker}}",
)


def read_placements(run_dir: Path, step: int) -> dict[int, tuple[int, ...]]:
    """Return the experts of the engine's layers after a step."""
    if step == 0:
        return dict.fromkeys(range(4), initial_placement(8, 10))
    content = json.loads((run_dir / "checkpoints" / f"step_{step:06d}" / "expert_placement.json").read_text())
    return {layer: tuple(experts) for layer, experts in content["placements"]}


def test_experts_move_between_steps_and_the_policy_stays(
    tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer, whose experts stay, agrees with the engine in every step: the copies have the trainer's weights, and
    get the tokens of their experts. The second weight sync loses the engine, which starts again with its experts in
    order. The fourth step is that of a run that resumes, and in the fifth the records are only counted."""
    folder, run_dir = make_folder(tmp_path / "quickstart", "qwen3_moe"), tmp_path / "run"
    monkeypatch.setitem(ENVIRONMENT, "ENGINE_FAULTS", json.dumps({2: ["weight_sync", 0]}))
    train(folder, run_dir, *SETTINGS, "run.num_rollout=3", host=host)
    train(folder, run_dir, *SETTINGS, "run.num_rollout=4", "run.resume=auto", host=host)
    resumed = "run.num_rollout=5", "run.resume=auto", "train.routing_replay=false"
    train(folder, run_dir, *SETTINGS, *resumed, host=host)
    *steps, counted = read_steps(run_dir)
    assert [step["step"] for step in (*steps, counted)] == [1, 2, 3, 4, 5]
    assert 1 <= counted["rollout/expert_imbalance_placed"] <= counted["rollout/expert_imbalance"]
    assert "rollout/logprob_diff_mean_unreplayed" not in counted
    rows = list(read_records(run_dir, 5, include_trainer_columns=True))
    assert len(rows) == 16 and all(row.rollout.routing is None for row in rows)
    assert [step.get("rollout/engine_restarts", 0) for step in steps] == [0, 1, 0, 0]
    assert max(step["rollout/logprob_diff"] for step in steps) <= 1e-4
    placements = [read_placements(run_dir, step) for step in range(5)]
    assert placements[0] != placements[1] != placements[2]
    shape = routing_shape(load_hf_config(folder / "model"), {})
    for step in steps:
        records = read_records(run_dir, step["step"], include_trainer_columns=True)
        load = sum(count_tokens(record.rollout, shape).numpy() for record in records)
        before, after = placements[step["step"] - 1 : step["step"] + 1]
        for name, placement in (("expert_imbalance", before), ("expert_imbalance_placed", after)):
            expected = [imbalance(load[layer], placement[layer], 2) for layer in range(4)]
            assert step[f"rollout/{name}"] == pytest.approx(np.mean(expected)), (step["step"], name)
        assert step["rollout/expert_imbalance_placed"] <= step["rollout/expert_imbalance"]
