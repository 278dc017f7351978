"""Engines that die or hang in whole runs, with real SGLang, Megatron and signals.

The run continues, no sample is lost or repeated, and each has the prompt, group and seed of an undisturbed run. Tests
with scripted engines check that tokens are equal too; real engines batch differently from run to run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import HAS_GPU
from test_placement_end_to_end import sample_ids, weight_versions
from training_run import ENVIRONMENT, make_folder, read_steps, run_cli

from megarl.observe.rollout_log import read_rollouts

pytestmark = pytest.mark.nightly

GRPO = ["algorithm=grpo", "kl.apply_to=reward", "run.num_update=1", "run.ppo_epochs=1"]
GRPO += ["run.save_every=0", "run.distributed_timeout_s=120"]
FAULTS = [
    "roles={rollout: {worker: faulty_rollout_worker:FaultyRolloutWorker}}",
    "rollout.hang_timeout=30",
    "rollout.concurrency=6",
    "train.routing_replay=true",  # without it, a tie of two experts changes the log-probs of a whole rollout
]
ONE_ENGINE = ["placement={actor: 0, rollout: 1}", "parallel.world_size=2", "parallel.tp=1", "parallel.ep=1"]
ONE_ENGINE += ["rollout.concurrency=12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, run_dir: Path, host: str, plan: dict[int, Any], *overrides: str
) -> Any:
    monkeypatch.setitem(ENVIRONMENT, "ENGINE_FAULTS", json.dumps(plan))
    return run_cli(folder, run_dir, *GRPO, *FAULTS, *overrides, host=host)


def assert_recovered(run_dir: Path, faults: dict[int, str]) -> None:
    """Check that every step has all of its samples and reports the faults."""
    rows = read_steps(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3]
    log = (run_dir / "log.txt").read_text()
    for row in rows:
        step = int(row["step"])
        fault = faults.get(step)
        assert ("rollout/engine_restarts" in row) == (fault is not None), step
        num_lost = row.get("rollout/lost_samples", 0)
        assert row.get("rollout/regenerated_samples", 0) == num_lost and (num_lost > 0) == (
            fault in ("kill", "stop")
        ), step
        assert len(read_rollouts(run_dir, step)) == 16
        assert [item.status for item in read_rollouts(run_dir, step) if item.status == "aborted"] == []
        assert weight_versions(run_dir, step) == {step - 1}
        assert row["rollout/logprob_diff_p95"] <= 1e-4  # the engine has the synced weights
    assert log.count("is being restarted") == len(faults) == log.count(" restarted, ")


@pytest.fixture(scope="module")
def reference_run(folder: Path, host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    with pytest.MonkeyPatch.context() as patched:
        done = run(patched, folder, run_dir, host, {})
    assert done.returncode == 0, done.stderr[-3000:]
    assert_recovered(run_dir, {})
    return run_dir


def test_recovers_from_engine_death_hang_and_failed_weight_sync(
    reference_run: Path, folder: Path, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {1: ["kill", 1], 2: ["stop", 0], 3: ["weight_sync", 1]}
    done = run(monkeypatch, folder, tmp_path / "run", host, plan)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_recovered(tmp_path / "run", {step: fault for step, (fault, _) in plan.items()})
    for step in (1, 2, 3):
        assert sample_ids(tmp_path / "run", step) == sample_ids(reference_run, step)


def test_restarts_the_only_engine(folder: Path, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads the first step's weights from the model folder, and gets those of step 3 from the trainer."""
    plan = {1: ["kill", 0], 3: ["kill", 0]}
    done = run(monkeypatch, folder, tmp_path / "run", host, plan, *ONE_ENGINE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_recovered(tmp_path / "run", {1: "kill", 3: "kill"})


@pytest.mark.skipif(HAS_GPU, reason="vLLM is installed on CPUs only")
def test_restarts_an_engine_of_vllm(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with TP2 and EP2 dies while it generates, with truncated sampling, and in a weight sync."""
    vllm = ["rollout.engine=vllm", "rollout.tp=2", "rollout.ep=2", "rollout.top_p=0.9", "rollout.concurrency=12"]
    done = run(monkeypatch, folder, tmp_path / "run", "", {1: ["kill", 0], 2: ["weight_sync", 0]}, *vllm)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_recovered(tmp_path / "run", {1: "kill", 2: "weight_sync"})


def test_restarts_an_engine_during_asynchronous_training(
    folder: Path, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {1: ["kill", 0], 2: ["weight_sync", 0]}
    async_overrides = ["rollout.asynchronous=true", "rollout.max_staleness=1", "train.routing_replay=false"]
    done = run(monkeypatch, folder, tmp_path / "run", host, plan, *ONE_ENGINE, *async_overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows) == 2
    assert sum(row.get("rollout/lost_samples", 0) for row in rows) > 0
    for row in rows:
        result = read_rollouts(tmp_path / "run", int(row["step"]))
        assert len(result) == 16 and [item for item in result if item.status == "aborted"] == []
        assert row["rollout/staleness_max"] <= 1


def test_recovers_from_a_killed_and_a_stopped_engine_host(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 loses the host with both engines; step 2 kills an engine whose restart needs the stopped host."""
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path))
    done = run(monkeypatch, folder, tmp_path / "run", "", {1: ["host", 0], 2: ["stopped", 1]})
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_steps(tmp_path / "run")
    assert [(row["step"], row.get("rollout/engine_restarts", 0)) for row in rows] == [(1, 2), (2, 1), (3, 0)]
    for step in (1, 2, 3):
        result = read_rollouts(tmp_path / "run", step)
        assert len(result) == 16 and [item for item in result if item.status == "aborted"] == []
        assert weight_versions(tmp_path / "run", step) == {step - 1}
    assert "the engine host process ended (SIGKILL) and is restarted" in done.stderr
    assert "the engine host process was stopped (SIGSTOP) and was sent SIGCONT" in done.stderr
    assert list(tmp_path.glob("megarl-*")) == []
