"""Training under random kills, which must end with the weights of an undisturbed run."""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.table import Table

from faults.fixtures import GROUPS, KEYS, SAMPLES, Fixtures, wait_until_finished
from faults.job import Job, UnexpectedOutcome, read_run_metrics, same_weights
from faults.recorded_answers import record
from faults.results import RowResult

IN_MATRIX_S, EVERY_S = 60.0, 15.0
"""Length of the soak of row 30, and average seconds between its kills."""
SHARE = 0.6
"""Share of the requested time that the undisturbed run takes."""
RESTARTS = "run.max_restarts"
TIMEOUT_S = 20
_PERCENTILES = (50, 90, 99)
_VICTIMS = {"rank": 3, "rank that hangs": 1, "process of a rank": 1, "launcher": 1}
"""Weights of the random choice of a victim."""


@dataclass(frozen=True)
class Kill:
    what: str
    at: float
    step: int
    """Last step completed before it."""
    recovered: float | None
    """Seconds until the next step was completed."""


@dataclass(frozen=True)
class Report:
    steps: int
    kills: list[Kill]
    seconds: float
    effective: float
    """Seconds of steps that counted, as a share of all seconds."""
    undisturbed: float
    """The same for the undisturbed run, which has to start, too."""
    by_hand: int
    """Starts that the tool had to make."""
    same: bool
    missing: int
    """Steps without metrics."""

    @property
    def ok(self) -> bool:
        return self.same and not self.missing

    @property
    def recoveries(self) -> list[float]:
        return [kill.recovered for kill in self.kills if kill.recovered is not None]

    def percentiles(self) -> dict[int, float]:
        return {share: percentile(self.recoveries, share) for share in _PERCENTILES} if self.recoveries else {}

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "recovery_percentiles": self.percentiles()}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this percentage of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(share) // 100) - 1)]


def effective_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of steps that counted; of a repeated step, the last attempt."""
    last = {row["step"]: row for row in rows if "time/step" in row}
    return float(sum(row["time/step"] for row in last.values()))


def recovered(rows: Sequence[Mapping[str, Any]], at: float, step: int) -> float | None:
    """Return seconds from a moment, at which a step was done, to the end of the next step."""
    times = [row["time"] for row in rows if row["step"] > step and row["time"] > at]
    return float(min(times) - at) if times else None


def run_scenario(fixtures: Fixtures, row_numbers: Sequence[int]) -> Iterator[tuple[int, RowResult]]:
    report = soak(fixtures, IN_MATRIX_S, EVERY_S)
    shares = ", ".join(f"{share} %: {seconds:.0f} s" for share, seconds in report.percentiles().items())
    text = f"{len(report.kills)} kills in {report.steps} steps; "
    text += "the weights are the same bits" if report.same else "NOT the weights of the undisturbed run"
    text += f"; effective {report.effective:.2f} of the time, undisturbed {report.undisturbed:.2f}; recovery {shares}"
    text += f"; {report.by_hand} of the starts by hand" if report.by_hand else "; started again by itself"
    recover = percentile(report.recoveries, 50) if report.recoveries else None
    yield (
        30,
        RowResult(report.ok and bool(report.recoveries), text, recover=recover, lost=report.missing * GROUPS * SAMPLES),
    )


def soak(fixtures: Fixtures, seconds: float, every: float, seed: int = 1) -> Report:
    """Run the soak. seconds: period in which it kills; it continues until the run is done. every: average seconds
    between kills."""
    times = [row["time"] for row in read_run_metrics(fixtures.undisturbed())]
    step_s = statistics.median(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    steps = max(8, min(10_000, int(SHARE * seconds / step_s)))
    fixtures.say(f"soak: {steps} steps of {step_s:.1f} s, a kill every {every:g} s on average")
    place = fixtures.new_folder("soak")
    answers = record(place / "answers", fixtures.material / "model", range(1, steps + 1), GROUPS, SAMPLES, ranks=2)
    overrides: dict[str, Any] = {
        "rollout__replay": answers,
        "run__num_rollout": steps,
        "run__distributed_timeout_s": TIMEOUT_S,
    }
    overrides |= {"run__max_restarts": 1000} if RESTARTS in KEYS else {}
    undisturbed_s = wait_until_finished(fixtures.start_replayed(place / "undisturbed", **overrides), _patience(seconds))
    fixtures.say(f"soak: undisturbed it takes {undisturbed_s:.0f} s")
    start = time.time()
    kills, by_hand = _under_kills(fixtures, place / "run", overrides, seconds, every, random.Random(seed))
    elapsed, rows = time.time() - start, read_run_metrics(place / "run")
    steps_done = {row["step"] for row in rows}
    return Report(
        steps=steps,
        kills=[Kill(what, at, step, recovered(rows, at, step)) for what, at, step in kills],
        seconds=elapsed,
        effective=effective_seconds(rows) / elapsed,
        undisturbed=effective_seconds(read_run_metrics(place / "undisturbed")) / undisturbed_s,
        by_hand=by_hand,
        same=same_weights(place / "run", place / "undisturbed"),
        missing=len(set(range(1, steps + 1)) - steps_done),
    )


def _patience(seconds: float) -> float:
    """Return the timeout of a run of a soak of this many seconds, on a shared machine."""
    return 10 * seconds + 600


def _under_kills(
    fixtures: Fixtures, run_dir: Path, settings: dict[str, Any], seconds: float, every: float, draw: random.Random
) -> tuple[list[tuple[str, float, int]], int]:
    """Run to the end under kills. Return what was killed, when, and after which step; and the number of starts by the
    tool."""
    kills: list[tuple[str, float, int]] = []
    starts, start = 0, time.time()
    due = start + draw.expovariate(1 / every)
    while True:
        with fixtures.start_replayed(run_dir, run__resume="auto", **settings) as job:
            while job.process.poll() is None:
                if due < time.time() < start + seconds:
                    step = max((row["step"] for row in job.metrics()), default=0)
                    if what := _kill_one(job, draw):
                        kills.append((what, time.time(), step))
                        fixtures.say(f"soak: killed a {what} behind step {step}")
                    due = time.time() + draw.expovariate(1 / every)
                if time.time() > start + _patience(seconds):
                    raise UnexpectedOutcome(f"the soak was not done after {time.time() - start:.0f} s")
                time.sleep(0.05)
            ended = job.wait()
        if ended.status == 0:
            return kills, starts
        if not kills:
            raise UnexpectedOutcome(f"the run ended before anything was killed: {ended.reason}")
        starts += 1
        fixtures.say(f"soak: started by hand after: {ended.reason}")


def _kill_one(job: Job, draw: random.Random) -> str:
    """Kill one of the run's processes, or stop it forever. Return its kind; empty if there is none."""
    ranks = list(job.ranks().values())
    below = [
        process.pid for process in job.family()[1:] if process.pid not in ranks and process.ppid() != job.process.pid
    ]
    what = draw.choices(list(_VICTIMS), list(_VICTIMS.values()))[0]
    if ranks == [job.process.pid]:  # the ranks have not started yet
        what = "launcher"
    pids = {"launcher": [job.process.pid], "process of a rank": sorted(below)}.get(what, sorted(ranks))
    if not pids:
        return ""
    try:
        job.send(draw.choice(pids), signal.SIGSTOP if what == "rank that hangs" else signal.SIGKILL)
    except (UnexpectedOutcome, ProcessLookupError, psutil.Error):
        return ""
    return what


def table(report: Report) -> Table:
    result = Table(box=box.SIMPLE, show_header=False)
    counts = Counter(kill.what for kill in report.kills)
    result.add_row("steps", str(report.steps))
    result.add_row("seconds", f"{report.seconds:.0f}")
    result.add_row("kills", f"{len(report.kills)}: " + ", ".join(f"{count} x {what}" for what, count in counts.items()))
    result.add_row("starts by hand", str(report.by_hand))
    result.add_row("effective-time ratio", f"{report.effective:.3f}, undisturbed {report.undisturbed:.3f}")
    for share, seconds in report.percentiles().items():
        result.add_row(f"recovery, {share} % within", f"{seconds:.1f} s")
    result.add_row("steps missing", str(report.missing))
    result.add_row("weights", "those of the undisturbed run, bit for bit" if report.same else "NOT the same")
    return result
