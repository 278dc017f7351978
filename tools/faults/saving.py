"""Runs killed while they write a checkpoint, at each of its stages."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from faults.fixtures import KEYS, Fixtures, run_rows
from faults.job import SAME_BITS, Job, checkpoints, same_weights, shortened
from faults.points import Point
from faults.results import Findings, RowResult
from megarl.checkpoint import manifest
from megarl.config import ConfigError

ASYNCHRONOUS = "run.save_async"
STAGES = ("tmp", "data", "manifest", "rename", "latest")
AT = 2
"""Step of the checkpoint."""


def run_scenario(fixtures: Fixtures, wanted: Sequence[int]) -> Iterator[tuple[int, RowResult]]:
    yield from run_rows(fixtures, wanted, {8: _stages, 14: _writer})


def resumed_from(log: str) -> list[int]:
    """Return the steps of the checkpoints that a run has resumed from, in order."""
    return [int(step) for step in re.findall(r"resumed from \S*/step_(\d+)", log)]


def whole(run_dir: Path, step: int) -> bool:
    """Return whether a checkpoint exists and its files match its manifest."""
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    try:
        manifest.check_checkpoint(folder, hashes=True)
        return True
    except ConfigError:
        return False


def _stages(fixtures: Fixtures) -> RowResult:
    """Kill the whole job at each stage in turn; each start resumes from what the previous one left. After the stage
    `rename` the new checkpoint is complete, although `latest` does not name it."""
    findings, run_dir, recover = Findings(), fixtures.new_folder("row_8") / "run", 0.0
    undisturbed = fixtures.undisturbed_sft()
    moment = 0.0
    for start, stage in enumerate((*STAGES, "")):
        point = [Point(stage, f"save:{stage}", AT)] if stage else []
        with fixtures.start_sft(run_dir, point, run__resume="auto") as job:
            if start:
                job.wait_for(lambda start=start: len(resumed_from(job.log)) >= start, "a resume")  # type: ignore[misc]
                recover = max(recover, time.time() - moment)
            if not stage:
                findings.add(job.wait().status == 0, "the last start came to its end")
                break
            job.reached(stage)
            moment = job.kill_all()
    expected = [1] * (len(STAGES) - 1) + [AT]
    resumed = resumed_from(job.log)
    for stage, was, wanted in zip(STAGES, resumed, expected, strict=False):
        findings.add(was == wanted, f"{stage}: step {was} loads", f"{stage}: step {was} loads, not {wanted}")
    leftovers = [name for name in checkpoints(run_dir) if name.endswith(".tmp")]
    findings.add(not leftovers, "nothing half-written is left", f"left: {leftovers}")
    findings.add(same_weights(run_dir, undisturbed), SAME_BITS)
    return findings.result(recover=recover)


def _writer(fixtures: Fixtures) -> RowResult:
    """End the thread that writes a step's asynchronous checkpoint in the middle of its files; at the next step, kill
    the whole rank there, and restart the run."""
    findings, run_dir = Findings(), fixtures.new_folder("row_14") / "run"
    undisturbed = fixtures.undisturbed_sft()
    more: dict[str, Any] = {"run__save_async": True} if ASYNCHRONOUS in KEYS else {}
    findings.add(bool(more), "saves are asynchronous", f"there are no asynchronous saves ({ASYNCHRONOUS})")
    points = [Point("writer", "save:data", AT, ends=True), Point("rank", "save:data", AT + 1)]
    with fixtures.start_sft(run_dir, points, **more) as job:
        findings.add(
            job.reached("writer")["beside"], "its writer ended, a thread", "what writes is the rank's main thread"
        )
        job.reached("rank")
        lines = [line for line in job.log.splitlines() if "ALARM" in line and f"step_{AT:06d}" in line]
        findings.add(bool(lines), f"said: {shortened(lines[0][21:] if lines else '', 110)}", "nothing is said of it")
        moment = job.kill_all()
        findings.add(not _damaged(run_dir), "no half commit", f"half of {_damaged(run_dir)} is committed")
    with fixtures.start_sft(run_dir, run__resume="auto", **more) as second:
        second.wait_for(lambda: resumed_from(second.log), "a resume")
        recover = time.time() - moment
        resumed = resumed_from(second.log)
        findings.add(resumed == [AT - 1], f"started again, from step {AT - 1}", f"started again, from {resumed}")
        ended = second.wait()
        findings.add(ended.status == 0, "the rest was trained", f"the run ended: {ended.why}")
    findings.add(not _left(second), "nothing half-written is left")
    findings.add(same_weights(run_dir, undisturbed), SAME_BITS)
    return findings.result(recover=recover)


def _damaged(run_dir: Path) -> list[str]:
    """Return the names of incomplete checkpoints."""
    names = [name for name in checkpoints(run_dir) if re.fullmatch(r"step_\d+", name)]
    return [name for name in names if not whole(run_dir, int(name[5:]))]


def _left(job: Job) -> list[str]:
    return [name for name in checkpoints(job.run_dir) if name.endswith(".tmp")]
