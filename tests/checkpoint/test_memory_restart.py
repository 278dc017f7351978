"""Full runs that restart from the memory of another node: SFT of a tiny MoE on two ranks, each a node of its own."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.launch.restarts import read_memory_step
from megarl.utils.addresses import free_port

ROOT = Path(__file__).resolve().parents[2]
RunTraining = Callable[..., list[dict[str, Any]]]
CONFIG = """
algorithm: sft
run: {num_rollout: 5, save_every: 100, memory_save_every: 1, memory_dir: $NODE_MEMORY}
model: {dtype: bfloat16}
parallel: {world_size: 2, ep: 2}
data: {prompts_per_step: 8}
rollout: {max_context: 256, max_new_tokens: 64}
actor_optimizer: {lr: 0.01, min_lr: 0.001, schedule: linear, warmup_fraction: 0.0}
track: {progress: false, trackers: []}
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data and a configuration."""
    folder = tmp_path_factory.mktemp("material") / "m"
    command = [sys.executable, "tools/make_quickstart.py", str(folder), "--demonstrations", "120", "--train", "8"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def settings(folder: Path, place: Path) -> list[str]:
    return [f"model.path={folder}/model", f"data.train={folder}/sft.jsonl", f"run.dir={place}/run"]


@pytest.fixture(scope="module")
def run(run_folder: Path, run_ranks: Callable[..., list[dict[str, Any]]]) -> RunTraining:
    def start(place: Path, event: str, *overrides: str, world: int = 2) -> list[dict[str, Any]]:
        arguments = [
            event,
            f"{place}/memory",
            str(run_folder / "config.yaml"),
            *settings(run_folder, place),
            *overrides,
        ]
        return run_ranks(world, "tests/checkpoint/ranks_memory_restart.py", *arguments)

    return start


@pytest.fixture(scope="module")
def disk_run(run: RunTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run without checkpoints in memory."""
    place = tmp_path_factory.mktemp("disk_run")
    results = run(place, "", "run.memory_save_every=0")
    assert [result["code"] for result in results] == [0, 0], results
    return place


def steps_in_memory(place: Path, node: int) -> list[str]:
    """Return a node's complete checkpoints; a kill may leave partial ones, or those that a thread was removing."""
    paths = (place / f"memory/node_{node}").glob("megarl-checkpoints-*/step_*")
    return sorted(path.name for path in paths if path.suffix != ".tmp")


def losses(place: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    return {line["step"]: line["actor/loss"] for line in lines}


def check_same_result(place: Path, reference: Path) -> None:
    actual, expected = (load_file(path / "run/export/model.safetensors") for path in (place, reference))
    assert losses(place) == losses(reference) and actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    assert not list(place.glob("memory/node_*/*")), "a run that ends removes its checkpoints in memory"
    assert not (place / "run/in_memory.json").exists()


@pytest.mark.parametrize("lost", [0, 1])
def test_continues_bitwise_without_one_node(run: RunTraining, disk_run: Path, tmp_path: Path, lost: int) -> None:
    assert [result["code"] for result in run(tmp_path, "kill_in_update_4")] == [-9, -9]
    assert "step_000002" in steps_in_memory(tmp_path, 0) + steps_in_memory(tmp_path, 1)
    shutil.rmtree(tmp_path / f"memory/node_{lost}")
    (newest,) = steps_in_memory(tmp_path, 1 - lost)
    results = run(tmp_path, "", "run.resume=auto")
    assert [result["code"] for result in results] == [0, 0], results
    assert f"/{newest} after step {int(newest.removeprefix('step_'))}" in results[0]["out"]
    check_same_result(tmp_path, disk_run)


STEPS_AFTER_KILL = {
    "kill_while_writing": {1},
    "kill_while_sending": {1},
    "kill_before_commit": {1, 2},  # 2 if the other node has renamed its part, which has the files of both
    "kill_after_commit": {2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("event", STEPS_AFTER_KILL)
def test_killed_save_leaves_the_one_before(run: RunTraining, disk_run: Path, tmp_path: Path, event: str) -> None:
    codes = [result["code"] for result in run(tmp_path, event)]
    assert -9 in codes and 0 not in codes
    results = run(tmp_path, "", "run.resume=auto")
    assert [result["code"] for result in results] == [0, 0], results
    assert any(f" after step {step}" in results[0]["out"] for step in STEPS_AFTER_KILL[event]), results
    check_same_result(tmp_path, disk_run)


@pytest.mark.nightly
def test_full_memory_of_another_node_skips_only_that_checkpoint(
    run: RunTraining, disk_run: Path, tmp_path: Path
) -> None:
    results = run(tmp_path, "memory_full")
    assert [result["code"] for result in results] == [0, 0], results
    alarms = [line for line in (tmp_path / "run/log.txt").read_text().splitlines() if "ALARM" in line]
    (alarm,) = (line for line in alarms if "could not write checkpoint" in line)
    assert "step_000002 in memory: No space left on device; earlier checkpoints are intact" in alarm
    assert "Training continues; if that recurs, free memory" in alarm
    check_same_result(tmp_path, disk_run)


@pytest.mark.nightly
def test_nodes_may_be_lost_one_after_the_other(run: RunTraining, disk_run: Path, tmp_path: Path) -> None:
    """A restart restores both copies, so that another node may be lost before the next save; also while it loads."""
    run(tmp_path, "kill_in_update_4")
    shutil.rmtree(tmp_path / "memory/node_0")
    assert -9 in [result["code"] for result in run(tmp_path, "kill_while_loading", "run.resume=auto")]
    run(tmp_path, "kill_in_update_1", "run.resume=auto")
    shutil.rmtree(tmp_path / "memory/node_1")
    results = run(tmp_path, "", "run.resume=auto")
    assert [result["code"] for result in results] == [0, 0], results
    assert "resumed from" in results[0]["out"]
    check_same_result(tmp_path, disk_run)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("event", "newest"), [("kill_in_update_4", "step_000003"), ("kill_in_update_5", "step_000004")]
)
def test_continues_from_the_newest_of_memory_and_disk(
    run: RunTraining, disk_run: Path, tmp_path: Path, event: str, newest: str
) -> None:
    settings = ("run.save_every=2", "run.save_async=false")
    assert [result["code"] for result in run(tmp_path, event, *settings)] == [-9, -9]
    assert steps_in_memory(tmp_path, 0) == steps_in_memory(tmp_path, 1) == ["step_000003"]
    results = run(tmp_path, "", "run.resume=auto", *settings)
    is_on_disk = f"resumed from {tmp_path}/run/checkpoints/{newest}" in results[0]["out"]
    assert f"/{newest} after step" in results[0]["out"] and is_on_disk == (newest == "step_000004")
    check_same_result(tmp_path, disk_run)


@pytest.mark.nightly
def test_a_third_node_reads_what_only_others_have(run: RunTraining, tmp_path: Path) -> None:
    """Data-parallel ranks read weights that the first has written, and of whose files the last has no copy."""
    layout = ("parallel.world_size=3", "parallel.ep=1", "data.prompts_per_step=6", "run.save_async=false")
    run(tmp_path / "plain", "", *layout, world=3)
    assert {result["code"] for result in run(tmp_path / "lost", "kill_in_update_4", *layout, world=3)} == {-9}
    shutil.rmtree(tmp_path / "lost/memory/node_1")
    (newest,) = (tmp_path / "lost/memory/node_2").glob("megarl-checkpoints-*/step_000003")
    assert not list(newest.glob("actor/__0_*"))
    results = run(tmp_path / "lost", "", *layout, "run.resume=auto", world=3)
    assert [result["code"] for result in results] == [0, 0, 0], results
    assert "step_000003 after step 3" in results[0]["out"]
    check_same_result(tmp_path / "lost", tmp_path / "plain")


@pytest.mark.nightly
def test_without_both_nodes_the_disk_remains(run: RunTraining, disk_run: Path, tmp_path: Path) -> None:
    run(tmp_path, "kill_in_update_4", "run.save_every=2", "run.save_async=false")
    shutil.rmtree(tmp_path / "memory")
    results = run(tmp_path, "", "run.resume=auto", "run.save_every=2")
    assert f"resumed from {tmp_path}/run/checkpoints/step_000002 after step 2" in results[0]["out"]
    check_same_result(tmp_path, disk_run)


@pytest.mark.nightly
def test_buffer_critic_and_reference_are_restored(
    run_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory, run_folder: Path
) -> None:
    """PF-PPO on recorded rollouts: its buffer has a file per rank, and every rank reads all of them."""
    other = runpy.run_path(str(ROOT / "tests/checkpoint/test_other_layouts.py"))
    folder = tmp_path_factory.mktemp("pf_ppo")
    rows = [json.loads(line) for line in (run_folder / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps({name: value for name, value in row.items() if name != "tools"}) for row in rows]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    config = str(other["CONFIG"]).replace("algorithm: ppo", "algorithm: pf_ppo")
    memory = "save_every: 100, memory_save_every: 1, memory_dir: $NODE_MEMORY, save_async: false"
    (folder / "config.yaml").write_text(config.replace("save_every: 1", memory))
    other["record_rollouts"](folder / "recorded")

    def start(place: Path, event: str, *overrides: str) -> list[dict[str, Any]]:
        paths = [f"model.path={run_folder}/model", f"data.train={folder}/train.jsonl", f"run.dir={place}/run"]
        paths += [f"rollout.replay={folder}/recorded", "parallel.world_size=2", "parallel.tp=2", "parallel.ep=2"]
        arguments = [event, f"{place}/memory", str(folder / "config.yaml"), *paths, *overrides]
        return run_ranks(2, "tests/checkpoint/ranks_memory_restart.py", *arguments)

    plain, lost = folder / "plain", folder / "lost"
    assert [result["code"] for result in start(plain, "")] == [0, 0]
    assert {result["code"] for result in start(lost, "kill_in_update_15")} == {-9}  # four per step
    shutil.rmtree(lost / "memory/node_0")
    results = start(lost, "", "run.resume=auto")
    assert [result["code"] for result in results] == [0, 0], results
    assert "/step_000003 after step 3" in results[0]["out"]
    actual, expected = (load_file(place / "run/export/model.safetensors") for place in (lost, plain))
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)
    parts = ("actor", "critic", "rollout", "reward")
    actual_steps, expected_steps = (
        [{name: row[name] for name in row if name.split("/")[0] in parts} for row in other["steps_of"](place / "run")]
        for place in (lost, plain)
    )
    assert actual_steps == expected_steps and len(actual_steps) == other["STEPS"]


@pytest.mark.nightly
def test_spare_continues_for_a_lost_node(run_folder: Path, disk_run: Path, tmp_path: Path) -> None:
    """The node's launcher and its rank are killed, and its memory is gone. Takes the minute for which others wait."""
    port, environment = free_port(), os.environ | {"MEGARL_SPARES": "1", "MEGARL_SECRET": "a" * 32}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megarl.torchrun", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    arguments = ["-m", "megarl.train", str(run_folder / "config.yaml"), *settings(run_folder, tmp_path)]
    launchers = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), *arguments, "parallel.ranks_per_node=1"],
            env=environment | {"NODE_MEMORY": f"{tmp_path}/memory/node_{node}", "SLURMD_NODENAME": f"n{node}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for node in range(3)
    ]
    deadline = time.monotonic() + 120
    while (step := read_memory_step(tmp_path / "run")) < 2:
        assert time.monotonic() < deadline and all(launcher.poll() is None for launcher in launchers)
        time.sleep(0.01)
    (rank,) = Path(f"/proc/{launchers[1].pid}/task/{launchers[1].pid}/children").read_text().split()
    for pid in (int(rank), launchers[1].pid):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(tmp_path / "memory/node_1")
    errors = [launcher.communicate(timeout=200)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, -signal.SIGKILL, 0], errors
    line = next(line for line in errors[0].splitlines() if line.startswith("error"))
    assert step <= 4 and " in memory (restart 1" in line and "is replaced by the spare node n2" in line
    assert f"resumed from {tmp_path}/memory/node_0/" in (tmp_path / "run/log.txt").read_text()
    check_same_result(tmp_path, disk_run)
