"""One policy learns in every kind of environment that MegaRL has ready, all in one run: tools, mathematics and code in
the sandbox, a game, a search."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "sandbox"))

from environment_tasks import ENVIRONMENTS, TASKS, write  # noqa: E402
from real_boxes import needs_boxes  # noqa: E402
from whole_run import ROOT, metrics_of, with_host  # noqa: E402

STEPS = 8


def train(config: str, host: str, *overrides: str) -> None:
    command = [sys.executable, "-m", "megarl.train", config, *overrides, "track.progress=false", "run.save_every=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, env=with_host(host))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has seen how each task is done, among guesses."""
    folder = tmp_path_factory.mktemp("tasks") / "f"
    write(folder, train=20 * STEPS, demonstrations=12800)
    own = [f"run.dir={folder}/sft", f"model.path={folder}/model", f"data.train={folder}/sft.jsonl"]
    train("configs/quickstart_sft.yaml", "", *own, "run.num_rollout=200")
    return folder


@needs_boxes
def test_each_kind_gets_better(warm: Path, host: str, tmp_path: Path) -> None:
    own = [f"run.dir={tmp_path}/run", f"model.path={warm}/sft/export", f"data.train={warm}/train.jsonl", "data.eval=[]"]
    rollout = [f"rollout.environments={json.dumps(ENVIRONMENTS)}", "rollout.tools=[]", "rollout.max_turns=7"]
    steps = [f"run.num_rollout={STEPS}", "data.prompts_per_step=20", "run.eval_every=0", "rollout.max_context=256"]
    reward = ["algorithm=grpo", "reward.functions=[environment_tasks:rewards]", "run.export=false", "expect={}"]
    train("configs/quickstart.yaml", host, *own, *rollout, *steps, *reward)
    rows = [row for row in metrics_of(tmp_path / "run") if "rollout/reward_mean" in row]
    assert len(rows) == STEPS and all(row["rollout/aborted_frac"] == 0 for row in rows)
    assert all(row["rollout/reward_failed_frac"] == 0 for row in rows if "rollout/reward_failed_frac" in row)
    for name in TASKS:
        found = [row[f"rollout/reward_mean/{name}"] for row in rows if f"rollout/reward_mean/{name}" in row]
        before, after = statistics.fmean(found[:2]), statistics.fmean(found[-2:])
        assert after > before + 0.1, (name, found)
