"""Host cost of a step outside of model, optimizer and engine: seconds by part, bytes sent, memory.

    .venv/bin/python tools/bench_flow.py [--ranks 2 4 8] [--sequences 512] [--lengths 2048-8192] [--turns 1]
        [--controller ppo] [--routing LAYERS TOPK] [--against fb96440]

Controllers, batches, workers, packing, row exchange and rollout log are real and run as processes on this machine; the
engines' answers are random arrays, and the models are mocked (`flow/ranks.py`). Every number of ranks gets the same
batch, in steps with a quarter of it, half of it and all of it. Seconds are medians over the repeats, of the slowest
rank, including its waits for others. CPU seconds are those of the rank that has the most; they do not depend on the
number of cores. `from a line`: deviation of the three sizes from a cost linear in tokens. `sent`: bytes that a rank
writes to sockets and to shared memory in a step, without the log. `memory`: peak over all ranks (sum of PSS), above the
level before the rollouts.

--against checks out another revision into a temporary folder and measures it, too.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flow import planned
from flow.answers import SIZES, Shape, total_tokens
from local_ranks import ROOT, run
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config.command_line import Parser, check_writable_file, int_in_range, run_cli
from megarl.config.strict import ConfigError

MOCK_MODEL = "model"
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


def run_ranks(spec: dict[str, Any], root: Path = ROOT, watch: MemoryWatch | None = None) -> list[dict[str, Any]]:
    """Run the ranks and return each rank's result. Without `watch`, memory is not sampled."""
    with tempfile.TemporaryDirectory(prefix="bench_flow_") as folder:
        if watch is not None:
            watch.watch_folder(Path(folder))
        script = str(Path(__file__).with_name("flow_rank.py"))
        results: list[dict[str, Any]] = run(
            [script, json.dumps({**spec, "folder": folder})], spec["ranks"], 7200.0, root, watch
        )
        return results


def measure(spec: dict[str, Any], root: Path) -> dict[str, Any]:
    """Measure a revision at one number of ranks."""
    watch = MemoryWatch()
    by_rank = run_ranks(spec, root, watch)
    memory = watch.result()
    summary = figures(by_rank, memory)
    return summary if spec["before"] else summary | {"beside": planned.compare_with_measured(spec, by_rank)}


def figures(by_rank: Sequence[dict[str, Any]], memory: dict[str, int]) -> dict[str, Any]:
    """Aggregate the ranks' results by size: medians over the repeats, of the slowest rank, and the most bytes."""
    results: dict[str, Any] = {"memory": memory}
    for size in SIZES:
        steps = [rank[size] for rank in by_rank]
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
    names = sorted({name for step in repeats for name in step} - {MOCK_MODEL})
    return {name: statistics.median(step.get(name, 0.0) for step in repeats) for name in names}


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Check out another revision of this repository into a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="bench_flow_")) / "before"
    process = git("worktree", "add", "--detach", str(folder), revision)
    if process.returncode:
        raise ConfigError(f"--against {revision}: {process.stderr.strip().splitlines()[-1]}")
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))
        shutil.rmtree(folder.parent, ignore_errors=True)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("git") is None:
        raise ConfigError("--against: git is not installed, by which another revision is checked out; install it")
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def make_table(results: dict[str, dict[int, Any]]) -> Table:
    """Build a table: one column per revision and number of ranks, one row per part and metric."""
    columns = [
        (name, world, results_by_size)
        for name, by_world in results.items()
        for world, results_by_size in by_world.items()
    ]
    table = Table("", *(f"{name}\n{world} ranks" for name, world, _ in columns), box=box.SIMPLE)
    full_size = [results_by_size["full"] for _, _, results_by_size in columns]
    for part in sorted({part for result in full_size for part in result["parts"]}):
        table.add_row(f"{part}, s", *(f"{result['parts'].get(part, 0.0):.3f}" for result in full_size))
    table.add_section()
    table.add_row(
        "host seconds of a step, slowest rank", *(f"{result['seconds']:.2f}" for result in full_size), style="bold"
    )
    table.add_row("of a processor, most of a rank", *(f"{result['busy']:.2f}" for result in full_size))
    table.add_row("tokens/s", *(f"{result['tokens'] / result['seconds']:,.0f}" for result in full_size))
    table.add_row(
        "a token's over a quarter's", *(f"{growth(results_by_size):.2f}" for _, _, results_by_size in columns)
    )
    for kind in ("seconds", "busy"):
        lines = [format_line(results_by_size, kind) for _, _, results_by_size in columns]
        label = "of a processor" if kind == "busy" else "of the slowest rank"
        table.add_row(f"{label}, ms a million tokens", *(f"{1e9 * slope:.0f}" for slope, _, _ in lines))
        table.add_row("  ms of none", *(f"{1e3 * start:.0f}" for _, start, _ in lines))
        table.add_row("  from a line", *(f"{deviation:.1%}" for _, _, deviation in lines))
    table.add_row("sent, most of a rank, MB", *(f"{result['sent'] / 1e6:.1f}" for result in full_size))
    table.add_row("sent by all ranks, MB", *(f"{result['sent_by_all'] / 1e6:.1f}" for result in full_size))
    table.add_row("memory: rollouts, MB", *(f"{result['memory']['rollouts'] / 1e6:.0f}" for _, _, result in columns))
    table.add_row("memory: most in a step, MB", *(f"{result['memory']['step'] / 1e6:.0f}" for _, _, result in columns))
    table.add_row("memory: recording it, MB", *(f"{result['memory']['log'] / 1e6:.0f}" for _, _, result in columns))
    return table


def growth(figures: dict[str, Any]) -> float:
    """Return CPU seconds per token at full size over those at quarter size: 1 if cost is proportional to tokens, less
    if a part of it is fixed."""
    quarter, full = figures["quarter"], figures["full"]
    return float(full["busy"] / full["tokens"] / (quarter["busy"] / quarter["tokens"]))


def format_line(figures: dict[str, Any], kind: str) -> tuple[float, float, float]:
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


def main() -> int:
    parser = Parser(description=__doc__)
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
        "--per-machine", type=int_in_range(), default=0, help="ranks of a machine, to play several; 0 for all"
    )
    parser.add_argument("--token-budget", type=int_in_range(), default=32768)
    parser.add_argument("--repeats", type=int_in_range(), default=3)
    parser.add_argument("--planned", action="store_true", help="what is planned of memory and messages, beside it")
    parser.add_argument("--against", default="", metavar="REVISION", help="does the same at the last number of ranks")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    options = parser.parse_args()
    layers, topk = options.routing
    shape = Shape(options.sequences, options.samples, options.lengths, options.turns, layers, topk)
    try:
        tokens = total_tokens(shape)
    except ValueError as error:
        raise ConfigError(f"--lengths: {error}") from None
    console = Console(width=120)
    console.print(f"{shape.sequences} sequences, {tokens:,} tokens, {options.controller}")

    def spec(world: int, before: bool) -> dict[str, Any]:
        if shape.sequences % (4 * options.samples * (world // options.engine_tp)):
            raise ConfigError(
                f"--sequences {shape.sequences} are not four times as many groups of {options.samples} for each of the "
                f"{world // options.engine_tp} engines"
            )
        settings = {
            name: getattr(options, name) for name in ("controller", "updates", "tp", "pp", "engine_tp", "repeats")
        }
        per_machine = options.per_machine or world
        return settings | dict(
            ranks=world, shape=vars(shape), token_budget=options.token_budget, per_machine=per_machine, before=before
        )

    specs = {world: spec(world, False) for world in options.ranks}
    if options.planned:  # return freed memory to the system at once, so that it is not counted
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 18)
    check_writable_file(options.json, "--json")
    if options.against and git("rev-parse", "--verify", f"{options.against}^{{commit}}").returncode:
        raise ConfigError(f"--against {options.against}: this repository has no such revision")
    results: dict[str, dict[int, Any]] = {"now": {world: measure(item, ROOT) for world, item in specs.items()}}
    if options.against:
        with checkout(options.against) as folder:
            results[options.against] = {options.ranks[-1]: measure(spec(options.ranks[-1], True), folder)}
    console.print(make_table(results))
    if options.planned:
        for world, item in results["now"].items():
            table = Table(f"{world} ranks, M", "planned", "measured", "", box=box.SIMPLE)
            for name, (planned, counted) in item["beside"].items():
                table.add_row(name, f"{planned / 1e6:.1f}", f"{counted / 1e6:.1f}", f"{planned / counted:.2f}")
            console.print(table)
    if options.against:
        now, before = (by_world[options.ranks[-1]] for by_world in results.values())
        console.print(
            f"at {options.ranks[-1]} ranks: seconds 1/{before['full']['seconds'] / now['full']['seconds']:.1f}, of a "
            f"processor 1/{before['full']['busy'] / now['full']['busy']:.1f}, sent "
            f"1/{before['full']['sent'] / now['full']['sent']:.1f}, memory "
            f"1/{before['memory']['step'] / now['memory']['step']:.1f} of {options.against}"
        )
        differing = differing_metrics(now["full"]["metrics"], before["full"]["metrics"])
        console.print(f"other metrics: {', '.join(differing)}" if differing else "all metrics are the same")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
