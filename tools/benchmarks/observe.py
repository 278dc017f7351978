"""Cost of trackers and profiler ranges: step time with them relative to without, interleaved in one run.

    .venv/bin/python tools/bench.py observe FOLDER [--trackers tensorboard,mlflow] [--blocks 8] [--steps 6]

Runs SFT of the quickstart's model on one rank, with the data that tools/make_quickstart.py writes to the folder. Steps
come in blocks: with nothing, with trackers (metrics and a table of four rows per step), with ranges (as while a
profiler runs), and again. The result of each kind is the median over its steps, without the first of each block, which
pays for the background work of the previous block. The kind with nothing is measured twice, to show the noise: on a
shared machine, only the CPU time of all threads of the process is meaningful.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import timeit
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Samples
from benchmarks.output import Report
from benchmarks.workloads import ROOT, check_quickstart
from megarl.config import ConfigError, load_config
from megarl.config.command_line import int_in_range
from megarl.observe.clock import Clock
from megarl.observe.tracker import TRACKERS, Tracker, check_trackers

KINDS = ("nothing", "trackers", "ranges", "nothing again")
ROW = ("What is 3 * (4 + 5)?" * 4, "<tool_call> 3 * (4 + 5) </tool_call> 27" * 4, 1.0, 60, "stop")


class AlternatingTracker(Tracker):
    """Passes steps to the trackers only in their own blocks; metrics.jsonl has all steps."""

    block = 6
    clock: Clock | None = None

    def log(self, step: int, metrics: Mapping[str, float], current_step: int = 0) -> None:
        from torch.profiler import record_function

        outlets = self._workers
        self._workers = outlets if self.kind(step) == "trackers" else []
        super().log(step, metrics, current_step)
        self.table(step, [(step, *ROW)] * 4)
        self._workers = outlets
        if self.clock is not None:
            self.clock.profiler_range = record_function if self.kind(step + 1) == "ranges" else None

    @classmethod
    def kind(cls, step: int) -> str:
        return KINDS[(step - 1) // cls.block % len(KINDS)]


def run_steps(settings: Sequence[str]) -> tuple[dict[int, float], dict[int, float]]:
    """Return the seconds of each step of the run, and the CPU seconds of all threads of its process; those of a step
    include writing the previous step's metrics."""
    from megarl.flow import HybridFlow  # imports Megatron, which patches torch permanently

    seconds: dict[int, float] = {}
    busy: dict[int, float] = {}
    stamps = [0.0]

    class Flow(HybridFlow):
        def _start(self) -> None:
            super()._start()
            log = self.log
            log._tracker = tracker = AlternatingTracker(log.run_dir, self.config.track.trackers, log._warn)
            tracker.clock = self.clock

        def _finish_step(self, result: Any) -> dict[str, float]:
            metrics = super()._finish_step(result)
            seconds[self.step] = metrics["time/step"]
            stamps.append(time.process_time())
            busy[self.step] = stamps[-1] - stamps[-2]
            return metrics

    Flow(load_config(ROOT / "configs/quickstart_sft.yaml", settings)).run()
    return seconds, busy


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of tools/make_quickstart.py")
    parser.add_argument("--trackers", default="tensorboard", help="of track.trackers, with commas")
    parser.add_argument("--blocks", type=int_in_range(), default=8, help="of each kind")
    parser.add_argument("--steps", type=int_in_range(2), default=6, help="of a block")


def run(options: argparse.Namespace, report: Report) -> None:
    folder = check_quickstart(options.folder, "sft.jsonl")
    names = options.trackers.split(",")
    if unknown := set(names) - set(TRACKERS):
        raise ConfigError(f"--trackers: {', '.join(sorted(unknown))} is none of {', '.join(TRACKERS)}")
    check_trackers(names)
    report.start()
    AlternatingTracker.block = options.steps
    warm = len(KINDS) * options.steps  # warm-up: opening trackers takes seconds
    with tempfile.TemporaryDirectory() as run_dir:
        settings = [
            *(f"model.path={folder}/model", f"data.train={folder}/sft.jsonl", f"run.dir={run_dir}/run"),
            *(f"run.num_rollout={warm + options.blocks * warm}", "run.export=false", "track.progress=false"),
            f"track.trackers=[{','.join(names)}]",
            *(f"parallel.{name}=1" for name in ("world_size", "ranks_per_node", "tp", "ep")),
        ]
        seconds, busy = run_steps(settings)
    medians = {kind: {"ms of a step": 1000 * statistics.median(by_step(seconds, kind, warm))} for kind in KINDS}
    samples = Samples(KINDS)
    for kind in KINDS:
        for block in zip(by_block(seconds, kind, warm), by_block(busy, kind, warm), strict=True):
            samples.add(kind, *block)
    report.table(f"steps of SFT, {options.blocks} blocks of {options.steps} of each kind", samples.rows(medians))
    clock = Clock()
    span = min(timeit.repeat(lambda: clock.span("x").__enter__, number=10_000, repeat=5)) / 10_000
    check = min(timeit.repeat("clock.profiler_range is None", number=100_000, repeat=5, globals={"clock": clock}))
    report.note(f"a span takes {1e6 * span:.2f} us, asking whether there is a profiler {1e9 * check / 100_000:.0f} ns")


def by_step(seconds: Mapping[int, float], kind: str, warm: int) -> list[float]:
    """Return the seconds of the steps of this kind, without the first of each block."""
    return [value for block in _blocks(seconds, kind, warm) for value in block]


def by_block(seconds: Mapping[int, float], kind: str, warm: int) -> list[float]:
    """Return the median seconds of a step in each block of this kind, without its first."""
    return [statistics.median(block) for block in _blocks(seconds, kind, warm)]


def _blocks(seconds: Mapping[int, float], kind: str, warm: int) -> list[list[float]]:
    size = AlternatingTracker.block
    starts = [step for step in range(warm + 1, max(seconds) + 1, size) if AlternatingTracker.kind(step) == kind]
    return [[seconds[step] for step in range(start + 1, start + size)] for start in starts]
