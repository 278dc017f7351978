"""Helpers for tests that train as a user does, on the output of `tools/make_quickstart.py`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import shared_jobs
from safetensors.torch import load_file

from megarl.config import load_config
from megarl.engine.engine_host import HOST_VARIABLE
from megarl.rehearse import nccl_order

ROOT = Path(__file__).resolve().parent.parent

SMALL = [
    "run.num_rollout=3",
    "run.save_every=1",
    "run.max_restarts=0",
    "run.keep_checkpoints=3",
    "run.eval_every=0",
    "data.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "track.progress=false",
    "reward.functions=[sum_reward:even]",
]
ONE_RANK = ["parallel.world_size=1", "parallel.ranks_per_node=1", "parallel.tp=1", "parallel.ep=1"]
# Engines import the package from this tree too, whichever one is installed.
ENVIRONMENT = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]), OMP_NUM_THREADS="1")


def build_command(folder: Path, run_dir: Path, *overrides: str) -> list[str]:
    """Return the command of a small quickstart run on the model and data of a folder."""
    paths = [
        f"model.path={folder}/model",
        f"data.train={folder}/train.jsonl",
        f"data.eval={folder}/eval.jsonl",
        f"run.dir={run_dir}",
    ]
    given = [text.split("=", 1) for text in overrides]
    layout = [] if any(key == "parallel" for key, _ in given) else [("parallel.tp", "2")]
    merged = dict([*(text.split("=", 1) for text in (*paths, *SMALL)), *layout, *given])  # the last value of a key wins
    settings = [f"{key}={value}" for key, value in merged.items()]
    return [sys.executable, "-m", "megarl.train", "configs/quickstart.yaml", *settings]


def run_cli(folder: Path, run_dir: Path, *overrides: str, host: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program with its launcher. host: socket of an engine host; without it, the program starts one."""
    command = build_command(folder, run_dir, *overrides)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=with_host(host))


def with_host(host: str) -> dict[str, str]:
    return ENVIRONMENT | ({HOST_VARIABLE: host} if host else {})


def train(folder: Path, run_dir: Path, *overrides: str, host: str = "", record: bool = False) -> None:
    """Run the program without its launcher, as ranks forked from a process that has imported everything.

    record: keep the communication of its ranks for `check_communication`.
    """
    _, _, _, config, *settings = build_command(folder, run_dir, *overrides)
    world = load_config(config, settings).parallel.world_size
    try:
        _, records = shared_jobs().run(
            world, "tests/train_rank.py", config, *settings, timeout=500, record=record, variables=with_host(host)
        )
    except pytest.fail.Exception as failure:  # the log of a rank that hung has its stacks
        for path in sorted((run_dir / "logs").glob("rank_*.log")):
            failure.add_note(f"--- {path}\n{path.read_text(errors='replace')[-8000:]}")
        raise
    if record:
        target = run_dir.parent / f"{run_dir.name}_communication"
        target.mkdir()
        for path in records:
            shutil.copy(path, target)


def check_communication(run_dir: Path) -> Counter[str]:
    """Check that the ranks of a recorded run would not hang on NCCL; return the number of device operations by kind."""
    folder = run_dir.parent / f"{run_dir.name}_communication"
    return nccl_order.check([nccl_order.read(path) for path in sorted(folder.iterdir())])


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of the training steps, without those of evaluations."""
    return [row for row in read_metrics(run_dir) if "rollout/reward_mean" in row]


REAL_TIME = ("time", "time/", "perf/", "eval/")
"""Prefixes of metrics that a replay has of its own, or that need an engine."""


def assert_replays(run: Callable[[Path, str], None], recorded: Path, *ignored: str) -> None:
    """Check that a replay of a run has the metrics of all its steps and the weights of its exports, bit for bit.

    run: trains with the configuration of the run, in another folder and with `rollout.replay`. ignored: other metrics.
    """
    replayed = recorded.with_name(f"{recorded.name}_replayed")
    run(replayed, f"rollout.replay={recorded}")
    expected, actual = (
        {
            row["step"]: {name: value for name, value in row.items() if not name.startswith((*REAL_TIME, *ignored))}
            for row in read_metrics(path)
            if "time/step" in row
        }
        for path in (recorded, replayed)
    )
    assert expected.keys() == actual.keys() and expected
    for step, row in expected.items():
        differing = {name for name in row.keys() | actual[step].keys() if row.get(name) != actual[step].get(name)}
        assert not differing, (step, {name: (row.get(name), actual[step].get(name)) for name in sorted(differing)})
    exports = sorted(path.name for path in recorded.glob("export*"))
    assert exports == sorted(path.name for path in replayed.glob("export*"))
    for export in exports:
        weights, replayed_weights = (load_file(path / export / "model.safetensors") for path in (recorded, replayed))
        assert weights.keys() == replayed_weights.keys()
        assert [name for name in weights if not torch.equal(weights[name], replayed_weights[name])] == []


def log_lines(run_dir: Path, text: str) -> list[str]:
    return [line for line in (run_dir / "log.txt").read_text().splitlines() if text in line]


def descendants(pid: int) -> list[int]:
    """Return a process ID and those of all processes below it."""
    result, todo = [], [pid]
    while todo:
        result.append(todo.pop())
        for task in Path(f"/proc/{result[-1]}/task").glob("*"):
            with contextlib.suppress(OSError):
                todo += map(int, (task / "children").read_text().split())
    return result


@cache
def _quickstart(family: str) -> Path:
    """Return a quickstart folder of a family, which this process makes once."""
    target = Path(tempfile.mkdtemp(prefix="megarl-quickstart-")) / "q"
    atexit.register(shutil.rmtree, target.parent, ignore_errors=True)
    sizes = ["--train", "512", "--held-out", "64", "--demonstrations", "2000"]  # each rank of each run reads them
    command = [sys.executable, "tools/make_quickstart.py", str(target), "--family", family, *sizes]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return target


def make_folder(target: Path, family: str) -> Path:
    """Write a model of a family and data sets of the quickstart into a folder; return the folder."""
    shutil.copytree(_quickstart(family), target)
    return target
