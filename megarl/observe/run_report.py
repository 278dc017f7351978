"""Summarise runs: a table and a plot.

    megarl report RUN_DIR [RUN_DIR...] [--plot FILE]

Shows the held-out reward before and after training, greedy and sampled, the reward of the first and last steps, where
the time went and where the files are; plots the reward curves and the seconds per phase to FILE (by default report.png
in the run folder; for several runs report_B_C.png in the first, after the names of the others). Of a run without
rewards, such as SFT or DPO, it shows the loss instead, and the accuracy on pairs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config import ConfigError
from megarl.config.command_line import Parser, check_writable_file, default_output_file, run_cli

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REWARD = "rollout/reward_mean"
WINDOW = 5  # steps in a smoothed curve; also the maximum number of first and last steps
CONTENTS = (
    ("metrics.jsonl", "metrics, one line per step"),
    ("tensorboard", "the same for TensorBoard"),
    ("rollouts", "every conversation; look with tools/view_rollouts.py"),
    ("evaluation", "those of evaluations, in the same form"),
    ("checkpoints", "whole states to resume from"),
    ("timeline", "who did what when; look with megarl timeline"),
    ("export", "the trained policy as a Hugging Face folder"),
    ("log.txt", "what the run said"),
    ("logs", "the processes' own logs: ranks, engines and reward workers"),
)


class Measure(NamedTuple):
    """Measure that training improves: its metric, name, and the metrics of evaluations in the same unit, by name."""

    metric: str
    title: str
    held_out: dict[str, str]


MEASURES = (
    Measure(REWARD, "reward", {"greedy": "eval/reward_greedy", "sampled": "eval/reward_sampled"}),
    Measure("actor/nll", "NLL of a token", {"NLL": "eval/nll"}),
    Measure("reward_model/loss", "loss", {"loss": "eval/loss"}),
    Measure("distill/reverse_kl", "reverse KL", {}),
    Measure("actor/loss", "loss", {"loss": "eval/loss"}),
)
"""A run has the first of those that its metrics have."""
ACCURACIES = ("reward_model/accuracy", "rewards/accuracy")
"""Metrics of training on pairs: the share whose chosen answer is preferred."""


@dataclass(frozen=True)
class Run:
    """Metrics of a run folder: `series(name)` returns the steps that have a metric, and its values."""

    path: Path
    algorithm: str
    metrics: dict[int, dict[str, float]]

    @property
    def name(self) -> str:
        return self.path.name or str(self.path)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        steps = [step for step, values in self.metrics.items() if name in values]
        return steps, [self.metrics[step][name] for step in steps]

    @property
    def measure(self) -> Measure:
        """Measure that training improves; the reward for a run with none of `MEASURES` yet."""
        return next((measure for measure in MEASURES if self.series(measure.metric)[0]), MEASURES[0])

    def accuracy(self) -> tuple[list[int], list[float]]:
        """Return the steps with an accuracy on training pairs, and its values; empty for other data."""
        return next((self.series(name) for name in ACCURACIES if self.series(name)[0]), ([], []))

    def phases(self) -> dict[str, float]:
        """Return mean seconds per step by phase, longest first; `other` is the time in no phase."""
        names = {name for values in self.metrics.values() for name in values if name.startswith("time/")}
        _, step_seconds = self.series("time/step")
        if not step_seconds:
            return {}
        seconds = {}
        for name in names - {"time/step"}:
            seconds[name.removeprefix("time/")] = sum(self.series(name)[1]) / len(step_seconds)
        unaccounted = statistics.fmean(step_seconds) - sum(seconds.values())
        if unaccounted > 0.01 * statistics.fmean(step_seconds):
            seconds["other"] = unaccounted
        return dict(sorted(seconds.items(), key=lambda item: (-item[1], item[0])))

    def minutes(self) -> float:
        """Return minutes of training: the sum of the steps, without start, evaluation and export."""
        return sum(self.series("time/step")[1]) / 60


def load_run(path: Path) -> Run:
    """Load a run folder. Raises ConfigError if it is none."""
    from megarl.observe.tracker import read_metrics  # imports torch

    if not path.is_dir():
        raise ConfigError(f"no run folder {path}; name one, such as runs/quickstart/run-1")
    try:
        metrics = {step: numbers(values) for step, values in read_metrics(path).items() if 0 <= step < 2**53}
    except (ValueError, RecursionError):
        raise ConfigError(f"{path / 'metrics.jsonl'} is no file of metrics; is {path} a run folder?") from None
    if not metrics:
        raise ConfigError(
            f"{path} has no metrics yet (metrics.jsonl is missing or has no complete line); is it a run folder?"
        )
    if not any(name.startswith(("time/", "eval/")) for values in metrics.values() for name in values):
        raise ConfigError(f"{path / 'metrics.jsonl'} has none of a run's metrics; is {path} a run folder?")
    algorithm = "?"
    config = path / "config.yaml"
    if config.is_file():
        try:
            tree = yaml.safe_load(config.read_text(encoding="utf-8"))
        except (ValueError, RecursionError, yaml.YAMLError):
            raise ConfigError(f"{config} is damaged; mend it, or take it away and the report goes without") from None
        algorithm = str(tree.get("algorithm", "?")) if isinstance(tree, dict) else "?"
    return Run(path, algorithm, metrics)


def numbers(values: dict[str, float]) -> dict[str, float]:
    """Return the numeric values of a row."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
    }


def before_after(run: Run, name: str) -> str:
    """Format `0.00 -> 0.95`, or `-` if the run has no such metric."""
    _, values = run.series(name)
    if not values:
        return "-"
    return f"{values[0]:.3f}" if len(values) == 1 else f"{values[0]:.3f} -> {values[-1]:.3f}"


def first_last(values: list[float]) -> str:
    """Format the means of the first and last steps, which do not overlap, or `-` without values."""
    if not values:
        return "-"
    size = min(WINDOW, len(values) // 2)
    ends = (values[:size], values[-size:]) if size else (values,)
    return " -> ".join(f"{statistics.fmean(end):.3f}" for end in ends)


def common_title(runs: list[Run]) -> str:
    """Return the title of the runs' measure, such as `reward`; empty if they have different ones."""
    titles = {run.measure.title for run in runs}
    return titles.pop() if len(titles) == 1 else ""


def new_table(title: str) -> Table:
    """Return a table at least as wide as its title, which would be wrapped otherwise."""
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", min_width=len(title) + 2)


def summary(runs: list[Run]) -> Table:
    """Build a table with a column per run, so that the numbers fit a narrow terminal."""
    common = common_title(runs)
    titles = dict.fromkeys(run.measure.title for run in runs)
    table = new_table(f"Mean {common}: before -> after" if common else "Before -> after")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, overflow="fold")
    rows: dict[str, list[str]] = {}
    for run in runs:
        figures = {
            "algorithm": run.algorithm,
            "held-out problems, greedy": before_after(run, "eval/reward_greedy"),
            "held-out problems, sampled": before_after(run, "eval/reward_sampled"),
            "held-out NLL of a token": before_after(run, "eval/nll"),
            "held-out pairs, loss": before_after(run, "eval/loss"),
            "held-out pairs, accuracy": before_after(run, "eval/accuracy"),
            **{
                "training, first and last steps" if common else f"training {title}, first and last": (
                    first_last(run.series(run.measure.metric)[1]) if title == run.measure.title else "-"
                )
                for title in titles
            },
            "training accuracy, first and last": first_last(run.accuracy()[1]),
            "steps": str(len(run.series("time/step")[0])),
            "minutes of training": f"{run.minutes():.1f}",
        }
        for name, figure in figures.items():
            rows.setdefault(name, []).append(figure)
    for name, values in rows.items():
        if not name.startswith(("held-out", "training accuracy")) or set(values) != {"-"}:
            table.add_row(name, *values)
    return table


def phase_table(runs: list[Run]) -> Table:
    table = new_table("Seconds a step, by phase")
    table.add_column("phase")
    names: dict[str, None] = {}
    for run in runs:
        table.add_column(run.name, justify="right", overflow="fold")
        names |= dict.fromkeys(run.phases())
    for name in names:
        table.add_row(name, *(f"{run.phases()[name]:.2f}" if name in run.phases() else "-" for run in runs))
    table.add_section()
    means = (run.series("time/step")[1] for run in runs)
    table.add_row("whole step", *(f"{statistics.fmean(values):.2f}" if values else "-" for values in means))
    return table


def file_lines(runs: list[Run]) -> list[str]:
    """Return lines, not a table: paths are for copying, and must not be wrapped to fit a column."""
    files = [
        (run.path / name, description) for run in runs for name, description in CONTENTS if (run.path / name).exists()
    ]
    width = max((len(str(path)) for path, _ in files), default=0)
    return [f"  {str(path):{width}}  {description}" for path, description in files]


def plot(runs: list[Run], file: Path) -> None:
    """Plot the curves of training and evaluations, and seconds per phase, to a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    plot_curves(left, runs)

    colours: dict[str, str] = {}
    for index, run in enumerate(runs):
        start = 0.0
        for name, seconds in run.phases().items():
            first = name not in colours
            colour = colours.setdefault(name, f"C{len(colours) % 10}")
            right.barh(index, seconds, left=start, color=colour, label=name if first else None, height=0.5)
            start += seconds
    right.set_yticks(range(len(runs)), [run.name for run in runs])
    right.set_ylim(max(len(runs), 2) - 0.4, -0.6)
    right.set_xlabel("seconds a step")
    right.set_title("Where the time goes")
    if colours:
        right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, fontsize="small", frameon=False)
    figure.savefig(file, dpi=120)


def plot_curves(axes: Axes, runs: list[Run]) -> None:
    """Plot each run's measure with that of evaluations, and on a second axis its accuracy on pairs."""
    from matplotlib.ticker import MaxNLocator

    common, markers = common_title(runs), (("o", None), ("s", "white"))
    second = axes.twinx() if any(run.accuracy()[0] for run in runs) else None
    for index, run in enumerate(runs):
        colour, measure = f"C{index}", run.measure
        training = "training, sampled" if measure is MEASURES[0] else "training"
        label = f"{run.name} ({run.algorithm}{'' if common else f', {measure.title}'})" if len(runs) > 1 else training
        steps, values = run.series(measure.metric)
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        axes.plot(steps, smooth(values), color=colour, label=label)
        for (kind, name), (marker, fill) in zip(measure.held_out.items(), markers, strict=False):
            steps, values = run.series(name)
            description = f"held-out, {kind}" if values and len(runs) == 1 else None
            axes.plot(steps, values, marker, color=colour, markerfacecolor=fill or colour, label=description)
        steps, values = run.accuracy()
        if second is not None and steps:
            second.plot(steps, smooth(values), color=colour, linestyle=":")
            axes.plot([], [], color=colour, linestyle=":", label="accuracy" if len(runs) == 1 else None)
    axes.set_xlabel("step")
    axes.set_ylabel(f"mean {common}" if common else "mean")
    title = f"{common[0].upper()}{common[1:]}" if common else "Training"
    axes.set_title(f"{title} (line: mean of {WINDOW} steps)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if second is not None:
        second.set_ylabel("accuracy on pairs (dotted)")
        second.set_ylim(0, 1.02)
    if len(runs) > 1:  # markers mean the same in every colour, so the legend shows them in grey
        kinds = [kind for run in runs for kind, name in run.measure.held_out.items() if run.series(name)[0]]
        for kind in dict.fromkeys(kinds):
            fill = "white" if kind == "sampled" else "grey"
            marker = "s" if kind == "sampled" else "o"
            axes.plot([], [], marker, color="grey", markerfacecolor=fill, label=f"held-out, {kind}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def smooth(values: list[float]) -> list[float]:
    """Return the mean of each value and the WINDOW - 1 before it."""
    return [statistics.fmean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__, prog="megarl report")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where the plot goes (default RUN_DIR/report.png)")
    return parser.parse_args(arguments)


def report(options: argparse.Namespace) -> int:
    from matplotlib.backend_bases import FigureCanvasBase

    runs = [load_run(path) for path in options.runs]
    file = options.plot or default_output_file(options.runs, "report.png")
    if (form := file.suffix[1:].lower()) not in (formats := FigureCanvasBase.get_supported_filetypes()):
        raise ConfigError(f"--plot {file}: a plot has one of the suffixes {', '.join(sorted(formats))}, not {form!r}")
    check_writable_file(file, "--plot")
    plot(runs, file)
    console = Console(highlight=False)
    console.print(summary(runs))
    console.print(phase_table(runs))
    print("Files", *file_lines(runs), f"  plot: {file}", sep="\n")
    return 0


def main(arguments: list[str]) -> int:
    return run_cli(lambda: report(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
