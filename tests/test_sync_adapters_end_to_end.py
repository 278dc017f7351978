"""Weight syncs that send LoRA's adapters alone, to MoE engines on two nodes, also when an engine dies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_run import ENVIRONMENT, make_folder, read_steps, train

pytestmark = pytest.mark.nightly

SETTINGS = (
    *("lora.rank=4", "rollout.sync_adapters_only=true", "rollout.verify_weights_every=2", "train.routing_replay=true"),
    *("model.dtype=float32", "run.save_every=0", "run.eval_every=0", "run.export=false", "actor_optimizer.lr=0.01"),
)


def test_engines_merge_the_trainers_bits(tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other sync is compared with one of all weights: a run stops if a box of an engine's tensors differs from
    the trainer's. The second one, the first that sends changes alone, loses an engine, which merges into newly loaded
    weights."""
    monkeypatch.setitem(ENVIRONMENT, "ENGINE_FAULTS", json.dumps({2: ["weight_sync", 1]}))
    nodes = ("parallel.ranks_per_node=1", "rollout.sync_changes_only=true", "run.num_rollout=4")
    faulty = "roles={rollout: {worker: faulty_rollout_worker:FaultyRolloutWorker}}"
    folder = make_folder(tmp_path / "quickstart", "qwen3_moe")
    train(folder, tmp_path / "run", *SETTINGS, *nodes, faulty, host=host)
    steps = read_steps(tmp_path / "run")
    assert [step.get("rollout/engine_restarts", 0) for step in steps] == [0, 1, 0, 0]
    for step in steps:
        assert step["rollout/logprob_diff"] < 1e-4 and step["actor/grad_norm"] > 0
        # Two ranks of a 3 MB model: all weights would be more than a megabyte.
        assert 0 < step["weight_sync/network_gb"] < 4e-4
    # The sync after the restart counts as the first. A comparison adds the hashes of all weights.
    _, _, sampled, verified = [step["weight_sync/network_gb"] / step["weight_sync/sent_frac"] for step in steps]
    assert 1e-6 < verified - sampled < 1e-4
