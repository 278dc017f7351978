"""How runs with roles on separate ranks end: one-line errors, no processes left, and a checkpoint to resume from.

The first run has an engine. It is stopped and resumed; the others replay its rollouts.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_placement_end_to_end import SPLIT, assert_same_weights
from training_run import ONE_RANK, ROOT, build_command, make_folder, read_steps, train, with_host
from transformers import AutoModelForSequenceClassification

from megarl.observe.rollout_log import read_rollouts

pytestmark = pytest.mark.nightly

TIMEOUT_S = 500.0
"""Limit on each wait for a run."""
REWARD = """
import time
from pathlib import Path
from sum_reward import even

here = Path(__file__).parent

def seen(rollout):
    (here / "seen").touch()
    while (here / "wait").exists():
        time.sleep(0.01)
    return even(rollout)

def odd(rollout):
    return float("nan") if rollout.turns[-1].weight_version else even(rollout)
"""


class BackgroundRun:
    """A run in the background. Its reward `watched:seen` touches the file `seen`, and blocks while `wait` exists."""

    def __init__(self, folder: Path, workdir: Path, *overrides: str, host: str = "") -> None:
        self.seen, self.wait, self.run_dir = workdir / "seen", workdir / "wait", workdir / "run"
        (workdir / "watched.py").write_text(REWARD)
        environment = with_host(host)
        environment["PYTHONPATH"] += os.pathsep + str(workdir)
        command = build_command(folder, self.run_dir, "reward.functions=[watched:seen]", *overrides)
        self.before = set(psutil.Process().children(recursive=True))
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                self.process.kill()  # its ranks end with it
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the run and of its engines, which may be children of an engine host."""
        return [item for item in psutil.Process().children(recursive=True) if item not in self.before]

    def rank(self, number: int) -> int:
        (result,) = [item for item in psutil.Process(self.process.pid).children() if is_rank(item, number)]
        return int(result.pid)

    def finish(self) -> tuple[int, list[str]]:
        """Wait until all processes of the run have ended; return the exit status and the lines of stderr."""
        processes = self.processes()
        try:
            _, err = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert alive == []
        return self.process.returncode, [line for line in err.splitlines() if line.strip()]

    def saved_steps(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("step_*"))


def is_rank(process: psutil.Process, number: int) -> bool:
    environment = process.environ()
    return environment.get("RANK") == str(number) and "WORLD_SIZE" in environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


@pytest.fixture(scope="module")
def stopped_run(folder: Path, host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that got SIGTERM in its first step, and saved only that step."""
    run = BackgroundRun(folder, tmp_path_factory.mktemp("stopped"), *SPLIT, "run.save_every=100", host=host)
    run.wait.touch()
    run.wait_for(run.seen.exists)
    os.killpg(run.process.pid, signal.SIGTERM)
    run.wait.unlink()
    assert run.finish() == (85, ["stopped on request: saved step 1, resume with run.resume=auto"])
    assert run.saved_steps() == ["step_000001"]
    checkpoint = run.run_dir / "checkpoints" / "step_000001"
    assert {"actor", "critic", "host.json"} <= {path.name for path in checkpoint.iterdir()}
    return run.run_dir


@pytest.fixture(scope="module")
def full_run(stopped_run: Path, folder: Path, host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, resumed with the same placement for two more steps."""
    run_dir = tmp_path_factory.mktemp("full") / "run"
    shutil.copytree(stopped_run, run_dir)
    train(folder, run_dir, *SPLIT, "run.save_every=100", "run.resume=auto", host=host)
    assert [row["step"] for row in read_steps(run_dir)] == [1, 2, 3]
    assert read_steps(run_dir)[0] == read_steps(stopped_run)[0]
    assert all(
        row["rollout/logprob_diff_p95"] <= 1e-4 for row in read_steps(run_dir)
    )  # the engine has the restored weights
    return run_dir


def test_resumes_a_stopped_run_on_one_rank(stopped_run: Path, full_run: Path, folder: Path, tmp_path: Path) -> None:
    """Weights end bitwise equal, so the optimizer state is restored too."""
    shutil.copytree(stopped_run, tmp_path / "run")
    train(folder, tmp_path / "run", *ONE_RANK, "run.resume=auto", f"rollout.replay={full_run}")
    assert [row["step"] for row in read_steps(tmp_path / "run")] == [1, 2, 3]
    assert_same_weights(full_run, tmp_path / "run")
    assert "placement" in (tmp_path / "run" / "changes.jsonl").read_text()


def test_error_names_the_killed_critic(full_run: Path, folder: Path, tmp_path: Path) -> None:
    """The errors of the other ranks are not shown."""
    run = BackgroundRun(
        folder, tmp_path, *SPLIT, f"rollout.replay={full_run}", "run.ppo_epochs=2000", "run.num_update=2000"
    )
    run.wait_for(run.seen.exists)
    os.kill(run.rank(1), signal.SIGKILL)
    line = "error: rank 1 (critic) was killed by SIGKILL (the kernel does that when memory runs out)"
    assert run.finish() == (137, [line])
    assert run.saved_steps() == []


def test_restarts_after_the_critic_is_killed(full_run: Path, folder: Path, tmp_path: Path) -> None:
    """The run restarts from its checkpoint and ends with bitwise equal weights."""
    run = BackgroundRun(
        folder, tmp_path, *SPLIT, f"rollout.replay={full_run}", "run.save_every=1", "run.max_restarts=3"
    )
    run.wait_for(lambda: "step_000001" in run.saved_steps())
    os.kill(run.rank(1), signal.SIGKILL)
    code, (line,) = run.finish()
    assert code == 0 and line.startswith("error: rank 1 (critic) was killed by SIGKILL"), line
    assert "; restarting in 2 s from checkpoint step_" in line
    assert {row["step"] for row in read_steps(run.run_dir)} == {1, 2, 3}
    assert_same_weights(full_run, run.run_dir)


def test_error_names_the_nan_reward(full_run: Path, folder: Path, tmp_path: Path) -> None:
    """The second step fails; the checkpoint of the first remains."""
    run = BackgroundRun(folder, tmp_path, *SPLIT, f"rollout.replay={full_run}", "reward.functions=[watched:odd]")
    code, (line,) = run.finish()
    assert code == 2 and line.startswith("error: ")
    assert "rollouts have no reward, more than reward.max_failed_frac=0.1 allows: " in line
    assert " x odd: it returned nan; it must return a finite number (on the sample 'train-" in line
    assert run.saved_steps() == ["step_000001"]


def test_error_names_nonfinite_values(full_run: Path, folder: Path, tmp_path: Path) -> None:
    """The rank with the rollouts finds them; it is neither the critic's nor the one that writes log.txt."""
    shutil.copytree(folder / "model", tmp_path / "model")
    weights = load_file(folder / "model" / "model.safetensors")
    weights["model.norm.weight"][:] = 3e38  # finite, so it loads, but the values overflow
    save_file(weights, tmp_path / "model" / "model.safetensors")
    run = BackgroundRun(folder, tmp_path, *SPLIT, f"rollout.replay={full_run}", f"critic.path={tmp_path}/model")
    code, (line,) = run.finish()
    assert code == 2, line
    events = re.fullmatch(
        r"error: step 1: not finite: values of the critic, (nan|inf) in (\d+) of (\d+) places; check the rewards and "
        r"the data, or lower critic\.optimizer\.lr",
        line,
    )
    actions = sum(item.num_actions for item in read_rollouts(full_run, 1))
    assert events and 0 < int(events[2]) <= int(events[3]) == actions
    assert line.removeprefix("error: ") in (run.run_dir / "log.txt").read_text()
    assert run.saved_steps() == []


# --- a reward model ---------------------------------------------------------------------------------------------------


def test_grpo_with_the_reward_model_on_its_own_rank(folder: Path, host: str, tmp_path: Path) -> None:
    """Routing replay sends the engine's routing to the actor's rank, and the replay on one rank uses its record."""
    model = tmp_path / "reward_model"
    make_reward_model(folder / "model", model)
    overrides = ["algorithm=grpo", "reward.functions=[]", f"reward.model={model}", "run.save_every=0"]
    overrides += ["kl.apply_to=reward", "run.num_update=1", "run.ppo_epochs=1", "train.routing_replay=true"]
    split = [*SPLIT, "placement={actor: 0, reward: 1, rollout: 2}"]
    train(folder, tmp_path / "split", *split, *overrides, host=host)
    rows = read_steps(tmp_path / "split")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout/logprob_diff"] <= 1e-4  # the maximum: replayed experts cannot tie
        assert row["actor/grad_norm"] > 0
        assert all(math.isfinite(number) for number in row.values())
    result = [item.reward for item in read_rollouts(tmp_path / "split", 3)]
    assert result == pytest.approx(scores(model, tmp_path / "split", 3), abs=1e-4)
    assert max(result) - min(result) > 0.01
    train(folder, tmp_path / "alone", *ONE_RANK, *overrides, f"rollout.replay={tmp_path}/split")
    for actual_row, expected_row in zip(rows, read_steps(tmp_path / "alone"), strict=True):
        for name in ("rollout/reward_mean", "actor/grad_norm", "actor/loss", "actor/entropy"):
            assert actual_row[name] == pytest.approx(expected_row[name], rel=1e-3, abs=1e-6), (actual_row["step"], name)


def make_reward_model(policy: Path, target: Path) -> None:
    """Save a reward model: the policy with a random scalar head. It uses all experts, so that none of them can tie."""
    torch.manual_seed(0)
    experts = {"num_experts_per_tok": json.loads((policy / "config.json").read_text())["num_experts"]}
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32, **experts)
    model.score.weight.data.normal_(std=0.3)
    shutil.copytree(policy, target)
    model.save_pretrained(target)


def scores(reward_model: Path, run_dir: Path, step: int) -> list[float]:
    """Score the sampled token ids with transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    with torch.no_grad():
        return [float(model(torch.tensor([item.token_ids.tolist()])).logits) for item in read_rollouts(run_dir, step)]
