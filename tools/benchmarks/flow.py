"""Host cost of a step outside of model, optimizer and engine: seconds by part, bytes sent, memory.

    .venv/bin/python tools/bench.py flow [--ranks 2 4 8] [--sequences 512] [--lengths 2048-8192] [--turns 1]
        [--controller ppo] [--routing LAYERS TOPK] [--planned] [--against REVISION --rounds 3]

Controllers, batches, workers, packing, row exchange and rollout log are real and run as processes on this machine; the
engines' answers are random arrays, and the models are mocked (`flow/ranks.py`). Every number of ranks gets the same
batch, in steps with a quarter of it, half of it and all of it. Seconds are medians over the repeats, of the slowest
rank, including its waits for others. CPU seconds are those of the rank that has the most; they do not depend on the
number of cores. `from a line`: deviation of the three sizes from a cost linear in tokens. `sent`: bytes that a rank
writes to sockets and to shared memory in a step, without the log. `memory`: peak over all ranks (sum of PSS), above the
level before the rollouts.

--against checks out another revision into a temporary folder, which takes turns with this one at the last number of
ranks. Its interfaces must be those of today.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flow import planned
from flow.answers import SIZES, Shape, total_tokens
from flow.parts import NOT_OURS
from local_ranks import run_function

from benchmarks.measure import compute_ratio
from benchmarks.output import Report
from benchmarks.workloads import ROOT
from megarl.config.command_line import int_in_range
from megarl.config.strict import ConfigError

EVERY_S = 0.03
"""Seconds between samples of the memory."""


class MemoryWatch:
    """Samples the memory of all ranks, by the phase that the ranks report."""

    def __init__(self) -> None:
        self._label, self.samples = Path(), {}  # type: ignore[var-annotated]
        self._stopped = threading.Event()

    def watch_folder(self, folder: Path) -> None:
        """Set the folder where the ranks report their phase."""
        self._label = folder / "label"

    def __call__(self, pids: Sequence[int]) -> None:
        threading.Thread(target=self._sample, args=(pids,), daemon=True).start()

    def _sample(self, pids: Sequence[int]) -> None:
        while not self._stopped.wait(EVERY_S):
            label = self._label.read_text() if self._label.exists() else ""
            if label:
                total = sum(map(pss, pids))
                self.samples.setdefault(label, []).append(total)

    def result(self) -> dict[str, int]:
        """Return peak bytes above the baseline: of the rollouts, of a step, and of recording while the batch is alive;
        0 for a phase too short to sample."""
        self._stopped.set()
        baseline = min(self.samples["baseline"])
        peaks = {label: max(samples) - baseline for label, samples in self.samples.items()}
        return {label: peaks.get(label, 0) for label in ("rollouts", "step", "log")}


def pss(pid: int) -> int:
    """Return the proportional set size of a process in bytes."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # the process has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))


def run_ranks(spec: Mapping[str, Any], root: Path = ROOT, watch: MemoryWatch | None = None) -> list[dict[str, Any]]:
    """Run the ranks and return each rank's result. Without `watch`, memory is not sampled."""
    with tempfile.TemporaryDirectory(prefix="bench_flow_") as folder:
        if watch is not None:
            watch.watch_folder(Path(folder))
        results: list[dict[str, Any]] = run_function(
            "flow.ranks:measure", spec["ranks"], **spec, folder=folder, timeout=7200.0, root=root, watch=watch
        )
        return results


def measure(spec: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Measure a revision at one number of ranks."""
    watch = MemoryWatch()
    by_rank = run_ranks(spec, root, watch)
    return {"by_rank": by_rank, "memory": watch.result()}


def combine(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Aggregate the runs' and the ranks' results by size: medians over the repeats, of the slowest rank, and the most
    bytes."""
    results: dict[str, Any] = {
        "memory": {label: max(run["memory"][label] for run in runs) for label in runs[0]["memory"]}
    }
    for size in SIZES:
        ranks = zip(*(run["by_rank"] for run in runs), strict=True)
        steps = [[step for part in rank for step in part[size]] for rank in ranks]
        parts = [medians([step["parts"] for step in rank]) for rank in steps]
        slowest = max(parts, key=lambda seconds: sum(seconds.values()))
        results[size] = {
            "parts": slowest,
            "seconds": sum(slowest.values()),
            "busy": max(statistics.median(step["busy"] for step in rank) for rank in steps),
            "sent": max(statistics.median(step["sent"] for step in rank) for rank in steps),
            "sent_by_all": sum(statistics.median(step["sent"] for step in rank) for rank in steps),
            "tokens": steps[0][0]["tokens"],
            "metrics": steps[0][-1]["metrics"],
        }
    return results


def medians(repeats: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return median seconds by part, without the mocked part."""
    names = sorted({name for step in repeats for name in step} - {NOT_OURS})
    return {name: statistics.median(step.get(name, 0.0) for step in repeats) for name in names}


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Check out another revision of this repository into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench_flow_") as parent:
        folder = Path(parent) / "other"
        process = git("worktree", "add", "--detach", str(folder), revision)
        if process.returncode:
            raise ConfigError(f"--against {revision}: {process.stderr.strip().splitlines()[-1]}")
        try:
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder))


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("git") is None:
        raise ConfigError("--against: git is not installed, by which another revision is checked out; install it")
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def make_row(title: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Build the table's column of one revision at one number of ranks."""
    full = result["full"]
    row = {"run": title} | {f"{part}, s": seconds for part, seconds in full["parts"].items()}
    row |= {"host seconds of a step, slowest rank": full["seconds"], "of a processor, most of a rank": full["busy"]}
    row |= {"tokens/s": full["tokens"] / full["seconds"], "a token's over a quarter's": growth(result)}
    for kind, label in (("seconds", "of the slowest rank"), ("busy", "of a processor")):
        slope, start, deviation = fit_line(result, kind)
        row |= {f"{label}, ms a million tokens": 1e9 * slope, f"{label}, ms of none": 1e3 * start}
        row[f"{label}, from a line, %"] = deviation
    row |= {"sent, most of a rank, MB": full["sent"] / 1e6, "sent by all ranks, MB": full["sent_by_all"] / 1e6}
    memory = {"rollouts": "rollouts", "step": "most in a step", "log": "recording it"}
    row |= {f"memory: {text}, MB": result["memory"][label] / 1e6 for label, text in memory.items()}
    return row | {"sizes": {size: result[size] for size in SIZES}}


def growth(figures: Mapping[str, Any]) -> float:
    """Return CPU seconds per token at full size over those at quarter size: 1 if cost is proportional to tokens, less
    if a part of it is fixed."""
    quarter, full = figures["quarter"], figures["full"]
    return float(full["busy"] / full["tokens"] / (quarter["busy"] / quarter["tokens"]))


def fit_line(figures: Mapping[str, Any], kind: str) -> tuple[float, float, float]:
    """Fit seconds linearly to tokens by least squares. Return seconds per token, fixed seconds, and the largest
    deviation relative to the largest value."""
    tokens = np.array([figures[size]["tokens"] for size in SIZES], float)
    seconds = np.array([figures[size][kind] for size in SIZES], float)
    slope, start = np.polyfit(tokens, seconds, 1)
    return float(slope), float(start), float(np.abs(slope * tokens + start - seconds).max() / seconds.max())


def differing_metrics(first: dict[str, float], second: dict[str, float]) -> list[str]:
    """Return the metrics that two revisions share and that differ beyond rounding, without metrics of time."""
    common = sorted(name for name in first.keys() & second.keys() if not name.startswith(("time/", "perf/")))
    return [name for name in common if abs(first[name] - second[name]) > 1e-4 * max(1.0, abs(first[name]))]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int_in_range(), nargs="+", default=[8], help="numbers of ranks, one after another"
    )
    parser.add_argument("--sequences", type=int_in_range(), default=512)
    parser.add_argument("--samples", type=int_in_range(), default=8, help="of a prompt")
    parser.add_argument("--lengths", default="2048-8192", help="tokens: 2048-8192, 32768 or lognormal")
    parser.add_argument("--turns", type=int_in_range(), default=1)
    parser.add_argument("--routing", type=int_in_range(), nargs=2, default=(0, 0), metavar=("LAYERS", "TOPK"))
    parser.add_argument("--controller", choices=("ppo", "grpo"), default="ppo")
    parser.add_argument("--updates", type=int_in_range(), default=4, help="optimizer steps")
    parser.add_argument("--tp", type=int_in_range(), default=1)
    parser.add_argument("--pp", type=int_in_range(), default=1)
    parser.add_argument("--engine-tp", type=int_in_range(), default=1, help="every so many ranks one has rollouts")
    parser.add_argument(
        "--per-machine", type=int_in_range(0), default=0, help="ranks of a machine, to play several; 0 for all"
    )
    parser.add_argument("--token-budget", type=int_in_range(), default=32768)
    parser.add_argument("--repeats", type=int_in_range(), default=3, help="steps of each size in a run")
    parser.add_argument("--planned", action="store_true", help="what is planned of memory and messages, beside it")
    parser.add_argument("--against", default="", metavar="REVISION", help="does the same at the last number of ranks")
    parser.add_argument("--rounds", type=int_in_range(), default=1, help="runs of each, in turn")


def make_spec(options: argparse.Namespace, world: int) -> dict[str, Any]:
    engines = world // options.engine_tp
    if options.sequences % (4 * options.samples * engines):
        raise ConfigError(
            f"--sequences {options.sequences} are not four times as many groups of {options.samples} for each of the "
            f"{engines} engines"
        )
    names = ("controller", "updates", "tp", "pp", "engine_tp", "repeats", "token_budget")
    settings = {name: getattr(options, name) for name in names}
    shape = Shape(options.sequences, options.samples, options.lengths, options.turns, *options.routing)
    return settings | {"ranks": world, "shape": vars(shape), "per_machine": options.per_machine or world}


def run(options: argparse.Namespace, report: Report) -> None:
    try:
        tokens = total_tokens(Shape(options.sequences, options.samples, options.lengths, options.turns))
    except ValueError as error:
        raise ConfigError(f"--lengths: {error}") from None
    specs = {world: make_spec(options, world) for world in options.ranks}
    if options.against and git("rev-parse", "--verify", f"{options.against}^{{commit}}").returncode:
        raise ConfigError(f"--against {options.against}: this repository has no such revision")
    report.start()
    if options.planned:  # return freed memory to the system at once, so that it is not counted
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 18)
    last = options.ranks[-1]
    columns = [("now", world) for world in specs] + ([(options.against, last)] if options.against else [])
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {column: [] for column in columns}
    with ExitStack() as stack:
        roots = {"now": ROOT}
        if options.against:
            roots[options.against] = stack.enter_context(checkout(options.against))
        for _ in range(options.rounds):
            for name, world in columns:
                runs[name, world].append(measure(specs[world], roots[name]))
    results = {column: combine(measured) for column, measured in runs.items()}
    rows = [make_row(f"{name}, {world} ranks", results[name, world]) for name, world in columns]
    title = f"{options.sequences} sequences, {tokens:,} tokens, {options.controller}"
    report.table(title, rows, transposed=True)
    for world in specs if options.planned else ():
        beside = planned.compare_with_measured(specs[world], runs["now", world][-1]["by_rank"])
        report.table(
            f"planned and measured, {world} ranks",
            [
                {"what": name, "planned, M": plan / 1e6, "measured, M": count / 1e6, "ratio": plan / count}
                for name, (plan, count) in beside.items()
            ],
        )
    if options.against:
        now, other = [[combine([run]) for run in runs[name, last]] for name in ("now", options.against)]
        ratios = [
            {
                "what": kind,
                "of the other": compute_ratio(*([run["full"][kind] for run in runs] for runs in (now, other))),
            }
            for kind in ("seconds", "busy", "sent")
        ]
        report.table(f"this revision at {last} ranks over {options.against}, in turn", ratios)
        metrics = [results[name, last]["full"]["metrics"] for name in ("now", options.against)]
        differing = differing_metrics(*metrics)
        report.note(f"other metrics: {', '.join(differing)}" if differing else "all metrics are the same")
