"""Compare off-policy corrections for stale tokens on the quickstart's task, against a run without one.

    .venv/bin/python tools/compare_corrections.py FOLDER [--staleness 2 4] [--seeds 1] [--only tis,icepop] [--steps 40]
                                                  [section.key=value ...]

FOLDER is that of launch/quickstart.sh, runs/quickstart: prompts, and the model after its warm-up in sft/export. All
runs are asynchronous GRPO, configs/quickstart_async.yaml with the actor on one rank and the engine on another, from the
same warm-up, with the same seeds. Run folders stay in FOLDER/corrections, and finished runs are not repeated. Overrides
apply to all runs. For each correction and maximum staleness, the table shows means over the seeds of

    greedy, sampled   held-out reward after the last step
    staleness         versions by which a token is older than the weights that learn from it
    difference        between the trainer's log-prob of such a token and its behavior log-prob
    ratio p95, ess    of the trainer's probability of a token to the engine's; effective sample size of the sequences
    weight, masked    mean weight of a token's loss, share of tokens that it masks
    KL                of an update's policy to the one that the ratio is clipped to
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import trials

from megarl.config import ConfigError, load_config
from megarl.config.command_line import Parser, int_in_range, run_cli
from megarl.engine.sglang.sglang_engine import start_host

CONFIG = "configs/quickstart_async.yaml"
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "uncorrected": ("correction.proximal=trainer",),
    "behavior": (),
    "bypass": ("correction.proximal=engine", "rollout.verify_weights_every=1"),  # so that the ratio is still measured
    "tis": ("correction.kind=tis",),
    "decoupled": ("correction.kind=tis", "correction.high=1e9"),
    "icepop": ("correction.kind=icepop",),
    "mis": ("correction.kind=mis",),
    "reject": ("correction.kind=reject",),
}
FIGURES = {
    "staleness": "rollout/staleness_mean",
    "difference": "rollout/logprob_diff_mean_stale",
    "ratio p95": "rollout_corr/ratio_p95",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
    "weight": "rollout_corr/rollout_is_mean",
    "masked": "rollout_corr/rollout_rs_masked_fraction",
    "KL": "actor/ppo_kl",
}
"""Metrics by title; each is a mean over a run's steps."""


def settings(options: argparse.Namespace, name: str, staleness: int, seed: int) -> list[str]:
    return [
        *("algorithm=grpo", "kl.apply_to=none", "placement={actor: 0, rollout: 1}"),
        *("parallel.world_size=2", "parallel.ranks_per_node=2"),
        *trials.quickstart(options.folder),
        *(f"run.num_rollout={options.steps}", f"run.eval_every={options.steps}", "run.export=false"),
        *("track.trackers=[]", "track.save_rollouts=false"),
        *options.overrides,
        *(f"run.seed={seed}", f"rollout.max_staleness={staleness}", *CORRECTIONS[name]),
    ]


def figures(rows: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return metrics of a run's steps by title."""
    last = rows[max(rows)]
    means = {name: last[f"eval/reward_{name}"] for name in ("greedy", "sampled")}
    for title, metric in FIGURES.items():
        values = [row[metric] for row in rows.values() if metric in row]
        means[title] = statistics.fmean(values) if values else float("nan")
    return means


def run_or_load(options: argparse.Namespace, name: str, staleness: int, seed: int, host: str) -> dict[str, float]:
    """Return the metrics of a run; start it unless it has already finished."""
    run_dir = options.folder / "corrections" / f"{name}_staleness{staleness}_seed{seed}"
    return figures(trials.run(CONFIG, settings(options, name, staleness, seed), run_dir, host))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of launch/quickstart.sh")
    parser.add_argument(
        "--staleness", type=int_in_range(0, 1000), nargs="+", default=[2, 4], help="values of rollout.max_staleness"
    )
    parser.add_argument("--seeds", type=int_in_range(), default=1, help="runs of each kind, with seeds 1, 2, ...")
    parser.add_argument("--only", default=",".join(CORRECTIONS), help=f"some of {','.join(CORRECTIONS)}")
    parser.add_argument("--steps", type=int_in_range(), default=40, help="of each run")
    parser.add_argument("overrides", nargs="*", help="of configs/quickstart_async.yaml, for all runs")
    options = parser.parse_intermixed_args(arguments)
    options.folder = options.folder.resolve()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in CORRECTIONS]:
        raise ConfigError(f"--only {unknown[0]}: unknown correction; the corrections are {', '.join(CORRECTIONS)}")
    titles = ["greedy", "sampled", *FIGURES]
    host = start_host(load_config(trials.ROOT / CONFIG, settings(options, names[0], 0, 1)), threads=1)
    try:
        print(f"{'':22}" + "".join(f"{title:>12}" for title in titles), flush=True)
        for staleness in options.staleness:
            for name in names:
                results = [
                    run_or_load(options, name, staleness, seed, host.path) for seed in range(1, options.seeds + 1)
                ]
                values = [statistics.fmean(result[title] for result in results) for title in titles]
                title = f"{name}, staleness {staleness}"
                print(f"{title:22}" + "".join(f"{value:12.3g}" for value in values), flush=True)
    finally:
        host.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
