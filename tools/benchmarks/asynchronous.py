"""Step time of asynchronous generation relative to synchronous generation.

    .venv/bin/python tools/bench.py asynchronous FOLDER [--epochs 2] [--steps 8] [--rounds 2] [section.key=value ...]

Runs GRPO with the actor on one rank and the engine on another, one core each, both real: the quickstart's model and
prompts, as tools/make_quickstart.py writes them to the folder. Each round runs every kind once; a run's time is the
median over its steps, without the first two. At best the shorter phase costs nothing: `--epochs` sets how long training
takes. Overrides apply to all kinds. The table also shows staleness and the engine's idle slots in the asynchronous
runs. Processor seconds are those of a whole run, its start included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Stopwatch, compute_ratio
from benchmarks.output import Report
from benchmarks.workloads import ROOT, check_quickstart
from megarl.config import load_config
from megarl.config.command_line import int_in_range
from megarl.engine.engine_host import HOST_VARIABLE
from megarl.engine.sglang.sglang_engine import start_host
from megarl.observe.tracker import read_metrics

WARM = 2
KINDS = {
    "synchronous": ["rollout.asynchronous=false"],
    "asynchronous, retract": ["rollout.asynchronous=true", "rollout.on_weight_sync=retract"],
    "asynchronous, in_place": ["rollout.asynchronous=true", "rollout.on_weight_sync=in_place"],
}
TRAINING = ("actor_logprobs", "actor_update")


def make_overrides(options: argparse.Namespace) -> list[str]:
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
    """Return a run's median step seconds by phase, the means of its metrics, and the run's processor seconds."""
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-W", "ignore", "-m", "megarl.train", "configs/quickstart.yaml"]
        command += [*make_overrides(options), *KINDS[kind], f"run.dir={run_dir}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", HOST_VARIABLE: host}
        with Stopwatch() as watch:
            process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise SystemExit(f"the {kind} run has failed:\n{process.stdout[-2000:]}{process.stderr[-2000:]}")
        rows = [row for row in read_metrics(run_dir).values() if "time/step" in row][WARM:]
    result = {"step": statistics.median(row["time/step"] for row in rows)}
    result["generate"] = statistics.median(row["time/generate"] for row in rows)
    result["train"] = statistics.median(sum(row.get(f"time/{name}", 0.0) for name in TRAINING) for row in rows)
    for name in ("staleness_mean", "group_age_s_mean", "idle_frac", "logprob_diff_p95", "logprob_diff_p95_stale"):
        if values := [row[f"rollout/{name}"] for row in rows if f"rollout/{name}" in row]:
            result[name.removeprefix("logprob_")] = statistics.fmean(values)
    return result | {"processor s": watch.processor_s}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of tools/make_quickstart.py")
    parser.add_argument(
        "--epochs", type=int_in_range(), default=2, help="updates of a step, each on all of its rollouts"
    )
    parser.add_argument("--steps", type=int_in_range(), default=8, help="that are timed in each run")
    parser.add_argument("--rounds", type=int_in_range(), default=2, help="runs of each kind, in turn")
    parser.add_argument("overrides", nargs="*", help="of configs/quickstart.yaml, for all runs")


def run(options: argparse.Namespace, report: Report) -> None:
    options.folder = check_quickstart(options.folder, "train.jsonl")
    config = load_config(ROOT / "configs/quickstart.yaml", make_overrides(options))
    report.start()
    host = start_host(config, threads=1)
    try:
        rounds = [{kind: run_timed(options, kind, host.path) for kind in KINDS} for _ in range(options.rounds)]
    finally:
        host.close()
    rows = []
    for kind in KINDS:
        names = [name for name in rounds[0][kind] if all(name in results[kind] for results in rounds)]
        samples = {name: [results[kind][name] for results in rounds] for name in names}
        synchronous = [results["synchronous"]["step"] for results in rounds]
        means = {name: statistics.fmean(values) for name, values in samples.items()}
        ratio = compute_ratio(synchronous, samples["step"])
        rows.append({"way": kind, **means, "times as fast": ratio, "samples": samples})
    report.table(f"seconds of a step, means of {options.rounds} runs of {options.steps} steps", rows)
