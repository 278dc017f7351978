"""Step time of asynchronous generation relative to synchronous generation.

    .venv/bin/python tools/bench_async.py FOLDER [--epochs 2] [--steps 8] [--rounds 2] [section.key=value ...]

Runs GRPO with the actor on one rank and the engine on another, one core each, both real: the quickstart's model and
prompts, as tools/make_quickstart.py writes them to the folder. Each round runs every kind once; a run's time is the
median over its steps, without the first two. At best the shorter phase costs nothing: `--epochs` sets how long training
takes. Overrides apply to all kinds. The table also shows staleness and the engine's idle slots in the asynchronous
runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megarl.config import ConfigError, load_config
from megarl.config.command_line import Parser, int_in_range, run_cli
from megarl.engine.engine_host import HOST_VARIABLE
from megarl.engine.sglang.sglang_engine import start_host
from megarl.observe.tracker import read_metrics

ROOT = Path(__file__).resolve().parents[1]
WARM = 2
KINDS = {
    "synchronous": ["rollout.asynchronous=false"],
    "asynchronous, retract": ["rollout.asynchronous=true", "rollout.on_weight_sync=retract"],
    "asynchronous, in_place": ["rollout.asynchronous=true", "rollout.on_weight_sync=in_place"],
}
TRAINING = ("actor_logprobs", "actor_update")


def settings(options: argparse.Namespace) -> list[str]:
    folder = options.folder
    return [
        "algorithm=grpo",
        "kl.apply_to=none",
        "placement={actor: 0, rollout: 1}",
        *("parallel.world_size=2", "parallel.ranks_per_node=2", "parallel.tp=1", "parallel.ep=1"),
        *(f"model.path={folder}/model", f"data.train={folder}/train.jsonl", f"data.eval={folder}/eval.jsonl"),
        *("run.eval_every=0", "run.export=false", "track.progress=false", "track.trackers=[]"),
        *(
            f"run.num_rollout={options.steps + WARM}",
            f"run.ppo_epochs={options.epochs}",
            f"run.num_update={options.epochs}",
        ),
        *options.overrides,
    ]


def run_timed(options: argparse.Namespace, kind: str, host: str) -> dict[str, float]:
    """Return a run's median step seconds by phase, and the means of its metrics."""
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-W", "ignore", "-m", "megarl.train", "configs/quickstart.yaml"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", HOST_VARIABLE: host}
        process = subprocess.run(
            [*command, *settings(options), *KINDS[kind], f"run.dir={run_dir}"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if process.returncode:
            raise SystemExit(f"the {kind} run has failed:\n{process.stdout[-2000:]}{process.stderr[-2000:]}")
        rows = [row for row in read_metrics(run_dir).values() if "time/step" in row][WARM:]
    result = {"step": statistics.median(row["time/step"] for row in rows)}
    result["generate"] = statistics.median(row["time/generate"] for row in rows)
    result["train"] = statistics.median(sum(row[f"time/{name}"] for name in TRAINING) for row in rows)
    for name in ("staleness_mean", "group_age_s_mean", "idle_frac", "logprob_diff_p95", "logprob_diff_p95_stale"):
        values = [row[f"rollout/{name}"] for row in rows if f"rollout/{name}" in row]
        result[name] = statistics.fmean(values) if values else float("nan")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of tools/make_quickstart.py")
    parser.add_argument(
        "--epochs", type=int_in_range(), default=2, help="updates of a step, each on all of its rollouts"
    )
    parser.add_argument("--steps", type=int_in_range(), default=8, help="that are timed in each run")
    parser.add_argument("--rounds", type=int_in_range(), default=2, help="runs of each kind, in turn")
    parser.add_argument("overrides", nargs="*", help="of configs/quickstart.yaml, for all runs")
    options = parser.parse_args(arguments)
    options.folder = options.folder.resolve()
    if not Path(options.folder, "train.jsonl").is_file():
        raise ConfigError(f"{options.folder} is not what tools/make_quickstart.py makes; call that first")
    config = load_config(ROOT / "configs/quickstart.yaml", settings(options))
    host = start_host(config, threads=1)
    try:
        rounds = [{kind: run_timed(options, kind, host.path) for kind in KINDS} for _ in range(options.rounds)]
    finally:
        host.close()
    names = list(rounds[0]["synchronous"])
    print(f"{'':24}" + "".join(f"{name.removeprefix('logprob_'):>18}" for name in (*names, "times as fast")))
    for kind in KINDS:
        values = [statistics.fmean(results[kind][name] for results in rounds) for name in names]
        ratio = statistics.median(results["synchronous"]["step"] / results[kind]["step"] for results in rounds)
        print(f"{kind:24}" + "".join(f"{value:18.3g}" for value in (*values, ratio)))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
