"""`slurm/ppo_moe.sh` on a real Slurm with three nodes on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]
ROOT = Path(__file__).resolve().parent.parent.parent

# Replaces megarl.train: the first start waits for the stop signal, the second finishes.
PAYLOAD = """
import os, signal, subprocess, sys, time
import torch, torch.distributed as dist
asked = False
def ask(number, frame):
    global asked
    asked = True
child = subprocess.Popen(["sleep", "600"])  # an engine, started before the handler is there
signal.signal(signal.SIGUSR1, ask)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
print(f"rank {dist.get_rank()} of {dist.get_world_size()} on node {os.environ['SLURMD_NODENAME']}, "
      f"start {restarts}, sum {total.item():g}, arguments {sys.argv[1:]}", flush=True)
if restarts == "0":
    deadline = time.monotonic() + 120
    while not asked and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"rank {dist.get_rank()} asked={asked} child={'alive' if child.poll() is None else 'dead'}", flush=True)
child.terminate()
child.wait()
dist.barrier()
dist.destroy_process_group()
sys.exit(85 if asked else 0)
"""


# Replaces megarl.train: a rank on n2 always dies.
CRASHING_TRAIN = """
import os, signal, sys, time
from megarl.launch import exit_status as ending
with ending.exit_on_error():
    ending.register_run(run_dir="run", save_every=1, max_restarts=1)
    rank, node = os.environ["RANK"], os.environ["SLURMD_NODENAME"]
    print(f"rank {rank} on {node}, attempt {ending.get_restart_count()}", flush=True)
    if os.environ["SLURMD_NODENAME"] == "n2":
        os.kill(os.getpid(), signal.SIGKILL)
    nodes = os.environ["SLURM_STEP_NODELIST"]
    is_n2_used = nodes == "n[1-2]" or (nodes == "n[1-3]" and ending.get_restart_count() < 2)  # then n3 replaces it
    time.sleep(600 if is_n2_used else 0)
"""
FAILING_TRAIN = """
import os, time
from megarl.launch import exit_status as ending
from megarl.config import ConfigError
with ending.exit_on_error():
    ending.register_run(run_dir="run", save_every=1, max_restarts=1)
    if os.environ["RANK"] == "1":
        raise ConfigError("reward.functions: gone")
    time.sleep(600)
"""


VALIDATION_STUB = """
from unittest.mock import MagicMock
validate = MagicMock()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder to submit from, with the payload as megarl.train."""
    shutil.copytree(ROOT / "megarl", tmp_path / "megarl", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "megarl" / "train.py").write_text(PAYLOAD)
    (tmp_path / "megarl" / "dry_run" / "validation.py").write_text(VALIDATION_STUB)
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "ranks_here.sh", tmp_path / "launch")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "two.yaml").write_text("parallel: {world_size: 2, ranks_per_node: 1, ep: 2}\n")
    return tmp_path


def test_two_node_job_resumes_after_its_time_limit(cluster, project: Path) -> None:
    output = project / "out.txt"
    script = str(ROOT / "slurm" / "ppo_moe.sh")
    options = ["--nodes=2", "--gres=none", f"--output={output}"]
    job = cluster.submit(*options, script, "two.yaml", "run.seed=7", cwd=project)
    cluster.wait_for(job, "RUNNING")
    wait_for_text(output, "rank 0 of 2", "rank 1 of 2")
    text = output.read_text()
    for rank, node in ((0, "n1"), (1, "n2")):
        start = "start 0, sum 3, arguments ['two.yaml', 'run.resume=auto', 'run.seed=7']"
        assert f"rank {rank} of 2 on node {node}, {start}" in text
    # As Slurm does shortly before the time limit (--signal=B:USR1@...).
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    wait_for_text(output, "back into the queue")
    for rank in (0, 1):
        assert f"rank {rank} asked=True child=alive" in output.read_text()
    cluster.wait_for(job, "PENDING")
    # Slurm would wait two minutes; start sooner, but not before the nodes have released the job.
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+4")
    cluster.wait_for(job, "COMPLETED")
    assert "rank 1 of 2 on node n2, start 1, sum 3" in output.read_text()
    assert cluster.fields(job)["Restarts"] == "1"


def test_tasks_of_a_sweep_have_their_values(cluster, project: Path) -> None:
    (project / "megarl" / "train.py").write_text("import sys\nprint('arguments', sys.argv[1:], flush=True)\n")
    (project / "slurm").symlink_to(ROOT / "slurm")
    options = f"--nodes=1 --gres=none --output={project}/out-%a.txt"
    grid = ["--grid", "kl.coef=0,0.5", "run.dir=runs", "parallel.world_size=1", "parallel.ep=1"]
    command = [sys.executable, "-m", "megarl.sweep", "two.yaml", *grid, "--sbatch", options]
    cluster.jobs.append(cluster.run(*command, cwd=project).split()[-1])
    for task, value in enumerate(("0", "0.5")):
        expected = f"'kl.coef={value}', 'run.dir=runs/000{task}', 'run.resume=auto']"
        wait_for_text(project / f"out-{task}.txt", expected)


def test_config_error_is_not_requeued(cluster, project: Path) -> None:
    output = project / "out.txt"
    script = str(ROOT / "slurm" / "ppo_moe.sh")
    options = ["--nodes=2", "--gres=none", f"--output={output}"]
    job = cluster.submit(*options, script, "two.yaml", "parallel.world_size=3", cwd=project)
    assert cluster.wait_for(job, "FAILED")
    assert "parallel.world_size=3 does not divide by 2 nodes" in output.read_text()


def test_crash_is_requeued_without_its_node(cluster, project: Path) -> None:
    """After a failed restart on the same node, if another node is available."""
    (project / "megarl" / "train.py").write_text(CRASHING_TRAIN)
    (project / "run" / "checkpoints" / "step_000004").mkdir(parents=True)
    output = project / "out.txt"
    options = ["--nodes=2", "--gres=none", f"--output={output}"]
    job = cluster.submit(*options, str(ROOT / "slurm" / "ppo_moe.sh"), "two.yaml", cwd=project)
    wait_for_text(output, "back into the queue after status 137, without n2")
    text = output.read_text()
    assert "rank 1 on n2, attempt 0" in text and "rank 1 on n2, attempt 1" in text and "attempt 2" not in text
    assert "from checkpoint step_000004 (restart 1 of this run, 1 of 1 without a new checkpoint)" in text
    cluster.wait_for(job, "PENDING")
    wait_until(lambda: cluster.fields(job)["ExcNodeList"] == "n2")
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+4")
    cluster.wait_for(job, "COMPLETED")
    assert "start 1: 2 nodes x 1 ranks, 0 spare nodes, on n[1,3]" in output.read_text()
    assert "rank 1 on n3, attempt 0" in output.read_text()


def test_a_spare_node_replaces_one_without_a_requeue(cluster, project: Path) -> None:
    (project / "megarl" / "train.py").write_text(CRASHING_TRAIN)
    output = project / "out.txt"
    options = ["--nodes=3", "--no-kill", "--gres=none", f"--output={output}", "--export=ALL,MEGARL_SPARES=1"]
    job = cluster.submit(*options, str(ROOT / "slurm" / "ppo_moe.sh"), "two.yaml", cwd=project)
    cluster.wait_for(job, "COMPLETED")
    text = output.read_text()
    assert "start 0: 2 nodes x 1 ranks, 1 spare nodes, on n[1-3]" in text
    assert "; node n2 is replaced by the spare node n3" in text and "rank 1 on n3, attempt 2" in text
    assert cluster.fields(job)["Restarts"] == "0" and not list(project.glob(".status*"))


def test_requeues_are_limited(cluster, project: Path) -> None:
    (project / "megarl" / "train.py").write_text(CRASHING_TRAIN)
    output = project / "out.txt"
    options = ["--nodes=2", "--gres=none", f"--output={output}", "--export=ALL,MEGARL_REQUEUES=0"]
    job = cluster.submit(*options, str(ROOT / "slurm" / "ppo_moe.sh"), "two.yaml", cwd=project)
    assert cluster.wait_for(job, "FAILED")
    assert "was requeued 0 times" in output.read_text() and cluster.fields(job)["ExitCode"] == "137:0"


def test_config_error_on_a_rank_is_not_requeued(cluster, project: Path) -> None:
    (project / "megarl" / "train.py").write_text(FAILING_TRAIN)
    output = project / "out.txt"
    options = ["--nodes=2", "--gres=none", f"--output={output}"]
    job = cluster.submit(*options, str(ROOT / "slurm" / "ppo_moe.sh"), "two.yaml", cwd=project)
    assert cluster.wait_for(job, "FAILED")
    text = output.read_text()
    assert "error: reward.functions: gone" in text and "queue" not in text and "restarting" not in text
    assert cluster.fields(job)["ExitCode"] == "2:0"


def test_moe_training_resumes_on_two_nodes(cluster, tmp_path: Path) -> None:
    """Megatron over two nodes with an engine on each, requeued after its first step."""
    quickstart = tmp_path / "quickstart"
    sizes = ["--train", "64", "--held-out", "16", "--demonstrations", "64"]
    command = [sys.executable, "-W", "ignore", "tools/make_quickstart.py", str(quickstart), *sizes]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    output, run = tmp_path / "out.txt", tmp_path / "run"
    job = cluster.submit(
        "--nodes=2",
        "--gres=none",
        f"--output={output}",
        "slurm/ppo_moe.sh",
        "configs/quickstart.yaml",
        "parallel.ranks_per_node=1",
        f"model.path={quickstart}/model",
        f"data.train={quickstart}/train.jsonl",
        f"run.dir={run}",
        "run.num_rollout=3",
        "run.save_every=0",
        "run.eval_every=0",
        "data.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "track.progress=false",
        cwd=ROOT,
    )
    cluster.wait_for(job, "RUNNING")
    wait_for_text(run / "metrics.jsonl", '"step": 1')
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    wait_for_text(output, "back into the queue")
    cluster.wait_for(job, "PENDING")
    steps_before = trained_steps(run)
    assert 1 <= len(steps_before) < 3, "the job should have stopped at the end of the step under way"
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+4")
    cluster.wait_for(job, "COMPLETED")
    assert cluster.fields(job)["Restarts"] == "1"
    steps = trained_steps(run)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert steps[: len(steps_before)] == steps_before, "steps before the stop are not repeated"
    assert all(row["rollout/logprob_diff_p95"] < 1e-4 for row in steps)
    assert (run / "export" / "config.json").is_file()


def trained_steps(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "actor/grad_norm" in row]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def wait_for_text(file: Path, *texts: str, timeout: float = 600.0) -> None:
    deadline = time.monotonic() + timeout
    while not (file.is_file() and all(text in file.read_text() for text in texts)):
        if time.monotonic() > deadline:
            content = file.read_text() if file.is_file() else "nothing"
            pytest.fail(f"{file} does not say {texts} after {timeout:g} s but:\n{content}")
        time.sleep(0.3)
