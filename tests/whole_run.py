"""The program as a user starts it, on what `tools/make_quickstart.py` makes: for the tests of whole runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import nccl_order
from rank_jobs import shared_jobs

from megarl.config import load_config
from megarl.engine.engine_host import HOST_VARIABLE

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
# This tree's package, also in engines, whichever one is installed.
ENVIRONMENT = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]), OMP_NUM_THREADS="1")


def command_of(folder: Path, run_dir: Path, *overrides: str) -> list[str]:
    """The quickstart with the model and the data of a folder, made small."""
    paths = [
        f"model.path={folder}/model",
        f"data.train={folder}/train.jsonl",
        f"data.eval={folder}/eval.jsonl",
        f"run.dir={run_dir}",
    ]
    argument = dict(text.split("=", 1) for text in (*paths, *SMALL, *overrides))  # the last of a key
    settings = [f"{key}={value}" for key, value in argument.items()]
    return [sys.executable, "-m", "megarl.train", "configs/quickstart.yaml", *settings]


def start(folder: Path, run_dir: Path, *overrides: str, host: str = "") -> subprocess.CompletedProcess[str]:
    """host: of engines; without, the program starts one."""
    command = command_of(folder, run_dir, *overrides)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=with_host(host))


def with_host(host: str) -> dict[str, str]:
    return ENVIRONMENT | ({HOST_VARIABLE: host} if host else {})


def train(folder: Path, run_dir: Path, *overrides: str, host: str = "", record: bool = False) -> None:
    """Run the program without its launcher, as ranks that are forked from a process that has imported everything.

    record: keep what its ranks communicate, for `communication_of`.
    """
    _, _, _, config, *settings = command_of(folder, run_dir, *overrides)
    world = load_config(config, settings).parallel.world_size
    _, records = shared_jobs().run(
        world, "tests/train_rank.py", config, *settings, timeout=500, record=record, variables=with_host(host)
    )
    if record:
        target = run_dir.parent / f"{run_dir.name}_communication"
        target.mkdir()
        for path in records:
            shutil.copy(path, target)


def communication_of(run_dir: Path) -> Counter[str]:
    """Check that the ranks of a recorded run would not hang on NCCL; count what they did together on the device."""
    folder = run_dir.parent / f"{run_dir.name}_communication"
    return nccl_order.check([nccl_order.read(path) for path in sorted(folder.iterdir())])


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def make_folder(target: Path, family: str) -> Path:
    command = [sys.executable, "tools/make_quickstart.py", str(target), "--family", family]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return target
