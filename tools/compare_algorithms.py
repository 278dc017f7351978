"""Compare all algorithms on the quickstart's task, from one warm-up, with the same seeds and samples.

    .venv/bin/python tools/compare_algorithms.py FOLDER [--algorithms grpo dapo] [--seeds 1 2] [--out runs/compared]
                                                 [section.key=value ...]

FOLDER is that of launch/quickstart.sh (runs/quickstart). Each algorithm runs configs/quickstart.yaml with `algorithm:
NAME`, that is with what its recipe sets, and the overrides; VAPO's critic warms up for four steps, not fifty. Runs that
are finished in --out are not repeated, so that an interrupted comparison continues.

Held out: the reward on 256 problems outside the training data, before and after. Reward, KL to the warm-up (where there
is a reference), entropy and response tokens are those of the last five steps; seconds are the median of a step.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import trials
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config import ConfigError, from_dict, load_config
from megarl.config.command_line import Parser, run_cli
from megarl.config.recipes import RECIPES
from megarl.controllers.controller import load_requirements
from megarl.engine.sglang.sglang_engine import start_host

matplotlib.use("Agg")
CONFIG = "configs/quickstart.yaml"
EXTRA_OVERRIDES = {"vapo": ["critic.warmup_steps=4"]}
"""Overrides that an algorithm needs to learn anything in so short a run."""
CURVES = {
    "reward": "rollout/reward_mean",
    "KL to the warm-up": "actor/kl_to_reference",
    "entropy": "actor/entropy",
    "tokens of an answer": "rollout/response_length_mean",
}
LAST = 5
Metrics = Mapping[int, Mapping[str, float]]


def list_comparable() -> list[str]:
    """Return the recipes that learn from a single reward and need no more than a policy, a critic and a reference."""
    roles = {"rollout", "actor", "critic", "reference", "reward"}
    configs = {name: from_dict({"algorithm": name}) for name in RECIPES}
    # The task's reward has one part, with which GDPO is GRPO normalized over the batch.
    requirements = {
        name: load_requirements(config) for name, config in configs.items() if config.advantage.estimator != "gdpo"
    }
    return [
        name
        for name, needs in requirements.items()
        if needs.item == "prompts" and needs.trained_roles and "reward" in needs.roles and set(needs.roles) <= roles
    ]


def figures(metrics: Metrics) -> dict[str, float]:
    """Return a run's metrics as the module docstring defines them; NaN for missing ones."""

    def last(name: str) -> float:
        values = [row[name] for row in metrics.values() if name in row][-LAST:]
        return statistics.fmean(values) if values else math.nan

    def ends(name: str) -> tuple[float, float]:
        values = [row[name] for row in metrics.values() if name in row]
        return (values[0], values[-1]) if values else (math.nan, math.nan)

    greedy, sampled = ends("eval/reward_greedy"), ends("eval/reward_sampled")
    seconds = [row["time/step"] for row in metrics.values() if "time/step" in row]
    return {
        "greedy before": greedy[0],
        "greedy after": greedy[1],
        "sampled before": sampled[0],
        "sampled after": sampled[1],
        **{label: last(name) for label, name in CURVES.items()},
        "s a step": statistics.median(seconds) if seconds else math.nan,
    }


def table(results: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    """Build a table with a row per algorithm: means over seeds."""
    names = list(next(iter(results.values()))[0])
    result = Table(box=box.SIMPLE_HEAD)
    result.add_column("algorithm")
    for name in names:
        result.add_column(name, justify="right")
    for algorithm, runs in results.items():
        cells = [statistics.fmean(run[name] for run in runs) for name in names]
        result.add_row(algorithm, *("-" if math.isnan(cell) else f"{cell:.3f}" for cell in cells))
    return result


def plot(runs: Mapping[str, Sequence[Metrics]], path: Path) -> None:
    """Plot four curves, with a line per algorithm: the mean over seeds."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    colours = matplotlib.colormaps["tab20"]
    for axis, (label, name) in zip(axes.flat, CURVES.items(), strict=True):
        for number, (algorithm, seeds) in enumerate(runs.items()):
            steps = sorted({step for metrics in seeds for step in metrics if name in metrics[step]})
            values = [statistics.fmean(m[step][name] for m in seeds if name in m.get(step, {})) for step in steps]
            if steps:
                axis.plot(steps, values, label=algorithm, color=colours(number % 20), linewidth=1.2)
        axis.set_title(label)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    FigureCanvasAgg(figure).print_png(str(path))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of launch/quickstart.sh")
    parser.add_argument("--algorithms", nargs="+", default=list_comparable())
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--out", type=Path, default=Path("runs/compared"), help="run folders, table.json, curves.png")
    parser.add_argument("overrides", nargs="*", help="key=value, of all runs")
    options = parser.parse_intermixed_args(arguments)
    if unknown := [name for name in options.algorithms if name not in list_comparable()]:
        raise ConfigError(f"--algorithms: {unknown[0]} is none of {', '.join(list_comparable())}")
    common = [*trials.quickstart(options.folder.resolve()), "run.export=false", *options.overrides]
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.algorithms:  # a mistake in any of them fails before an hour of runs
        load_config(trials.ROOT / CONFIG, [f"algorithm={name}", *EXTRA_OVERRIDES.get(name, []), *common])
    host = start_host(load_config(trials.ROOT / CONFIG, common), threads=1)
    runs: dict[str, list[Metrics]] = {}
    try:
        for name in options.algorithms:
            for seed in options.seeds:
                run_overrides = [f"algorithm={name}", f"run.seed={seed}", *EXTRA_OVERRIDES.get(name, []), *common]
                metrics = trials.run(CONFIG, run_overrides, options.out.resolve() / f"{name}-{seed}", host.path)
                runs.setdefault(name, []).append(metrics)
                after = figures(metrics)["greedy after"]
                print(f"{name}, seed {seed}: held out, greedy, {after:.3f}", flush=True)
    finally:
        host.close()
    results = {name: [figures(metrics) for metrics in seeds] for name, seeds in runs.items()}
    (options.out / "table.json").write_text(json.dumps(results, indent=1))
    plot(runs, options.out / "curves.png")
    Console(width=160).print(table(results))
    print(f"curves: {options.out / 'curves.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
