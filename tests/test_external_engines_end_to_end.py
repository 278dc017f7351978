"""A run that an engine outside of the job joins, is lost in the middle of a step, comes back, and leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_run import ENVIRONMENT, ONE_RANK, log_lines, make_folder, read_steps, train

from megarl.observe.rollout_log import read_rollouts
from megarl.utils.addresses import free_port

pytestmark = pytest.mark.nightly

SETTINGS = (
    *ONE_RANK,
    "rollout.hang_timeout=30",
    *("run.num_rollout=5", "run.save_every=0", "run.export=false", "rollout.verify_weights_every=1"),
    *("rollout.max_new_tokens=24", "rollout.concurrency=16", "algorithm=grpo", "train.routing_replay=true"),
    "roles={rollout: {worker: external_rollout_worker:ExternalRolloutWorker}}",
)


TWO_RANKS = ("parallel.world_size=2", "parallel.ranks_per_node=2")
COLOCATED = (*TWO_RANKS, "parallel.tp=2", "parallel.ep=2", "rollout.tp=2", "rollout.ep=2")
APART = (*TWO_RANKS, "parallel.tp=1", "parallel.ep=1", "placement={actor: 0, rollout: 1}")
EXPERTS = ("rollout.num_redundant_experts=2", "rollout.rebalance_experts_every=1")
ADAPTERS = ("lora.rank=4", "rollout.sync_adapters_only=true", "actor_optimizer.lr=0.01")
BY_DISK = ("rollout.external_weights_dir=WEIGHTS",)
ASYNC = ("rollout.asynchronous=true", "rollout.on_weight_sync=in_place", "rollout.max_staleness=0")


@pytest.mark.parametrize("layout", [(), (*ADAPTERS, *BY_DISK), (*COLOCATED, *EXPERTS), (*APART, *ASYNC)])
def test_an_engine_joins_is_lost_comes_back_and_leaves(
    layout: tuple[str, ...], tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every weight sync verifies all pieces, in the external engine, too, with adapters those that it has merged. Each
    step's log-probs are those of the trainer, whichever engine has sampled and wherever its experts are."""
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setitem(ENVIRONMENT, "EXTERNAL_ENGINE", address)
    monkeypatch.setitem(ENVIRONMENT, "MEGARL_ENGINE_SECRET", "a secret of this test alone")
    run_dir, weights = tmp_path / "run", tmp_path / "weights"
    settings = [text.replace("WEIGHTS", str(weights)) for text in (*SETTINGS, *layout)]
    train(make_folder(tmp_path / "quickstart", "qwen3_moe"), run_dir, *settings, host=host)
    steps = read_steps(run_dir)
    engines = [step.get("rollout/external_engines") for step in steps]
    shares = [step.get("rollout/external_frac") for step in steps]
    repeated = [step.get("rollout/external_repeated") for step in steps]
    # It is added in step 1, gets weights at the end of step 2, and is removed at the start of step 5.
    assert engines[:2] == [None, 0] and engines[3:] == [1, None], engines
    assert shares[1] == 0 and shares[3] > 0 and repeated[3] == 0, (shares, repeated)
    if "rollout.asynchronous=true" not in layout:  # there, step 3 may have generated before the engine is lost
        assert engines[2] == shares[2] == 0 and repeated[2] >= 1, (engines, shares, repeated)
    for step in steps:
        rollouts = read_rollouts(run_dir, int(step["step"]))
        assert len(rollouts) == 16 and all(rollout.status != "aborted" for rollout in rollouts)
        assert step["rollout/logprob_diff_p95"] <= 1e-4, step["step"]
    if "rollout.rebalance_experts_every=1" in layout:
        imbalances = [(step["rollout/expert_imbalance"], step["rollout/expert_imbalance_placed"]) for step in steps]
        assert any(before > after for before, after in imbalances[:3]), (
            imbalances
        )  # the external engine's are moved, too
    if "rollout.external_weights_dir=WEIGHTS" in layout:
        assert weights.is_dir() and list(weights.iterdir()) == []
    changes = log_lines(run_dir, f"external engine {address} ")
    expected = ["generates for this run", "is not used: ", "generates for this run", "is not used: it was removed"]
    assert len(changes) == 4 and all(text in line for text, line in zip(expected, changes, strict=True)), changes
