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
SAVE_STEP = 2
"""Step of the checkpoint."""


def run_scenario(fixtures: Fixtures, row_numbers: Sequence[int]) -> Iterator[tuple[int, RowResult]]:
    yield from run_rows(fixtures, row_numbers, {8: _stages, 14: _writer})


def resumed_from(log: str) -> list[int]:
    """Return the steps of the checkpoints that a run has resumed from, in order."""
    return [int(step) for step in re.findall(r"resumed from \S*/step_(\d+)", log)]


def is_complete(run_dir: Path, step: int) -> bool:
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
        point = [Point(stage, f"save:{stage}", SAVE_STEP)] if stage else []
        with fixtures.start_sft(run_dir, point, run__resume="auto") as job:
            if start:
                job.wait_for(lambda start=start: len(resumed_from(job.log)) >= start, "a resume")  # type: ignore[misc]
                recover = max(recover, time.time() - moment)
            if not stage:
                findings.add(job.wait().status == 0, "the last start came to its end")
                break
            job.wait_for_point(stage)
            moment = job.kill_all()
    expected = [1] * (len(STAGES) - 1) + [SAVE_STEP]
    resumed = resumed_from(job.log)
    for stage, was, expected_step in zip(STAGES, resumed, expected, strict=False):
        findings.add(
            was == expected_step, f"{stage}: step {was} loads", f"{stage}: step {was} loads, not {expected_step}"
        )
    leftovers = [name for name in checkpoints(run_dir) if name.endswith(".tmp")]
    findings.add(not leftovers, "nothing half-written is left", f"left: {leftovers}")
    findings.add(same_weights(run_dir, undisturbed), SAME_BITS)
    return findings.result(recover=recover)


def _writer(fixtures: Fixtures) -> RowResult:
    """End the thread that writes a step's asynchronous checkpoint in the middle of its files; at the next step, kill
    the whole rank there, and restart the run."""
    findings, run_dir = Findings(), fixtures.new_folder("row_14") / "run"
    undisturbed = fixtures.undisturbed_sft()
    async_settings: dict[str, Any] = {"run__save_async": True} if ASYNCHRONOUS in KEYS else {}
    findings.add(bool(async_settings), "saves are asynchronous", f"there are no asynchronous saves ({ASYNCHRONOUS})")
    points = [Point("writer", "save:data", SAVE_STEP, ends=True), Point("rank", "save:data", SAVE_STEP + 1)]
    with fixtures.start_sft(run_dir, points, **async_settings) as job:
        findings.add(
            job.wait_for_point("writer")["beside"],
            "its writer ended, a thread",
            "what writes is the rank's main thread",
        )
        job.wait_for_point("rank")
        lines = [line for line in job.log.splitlines() if "ALARM" in line and f"step_{SAVE_STEP:06d}" in line]
        findings.add(bool(lines), f"said: {shortened(lines[0][21:] if lines else '', 110)}", "nothing is said of it")
        moment = job.kill_all()
        findings.add(not _damaged(run_dir), "no half commit", f"half of {_damaged(run_dir)} is committed")
    with fixtures.start_sft(run_dir, run__resume="auto", **async_settings) as second:
        second.wait_for(lambda: resumed_from(second.log), "a resume")
        recover = time.time() - moment
        resumed = resumed_from(second.log)
        findings.add(
            resumed == [SAVE_STEP - 1], f"started again, from step {SAVE_STEP - 1}", f"started again, from {resumed}"
        )
        ended = second.wait()
        findings.add(ended.status == 0, "the rest was trained", f"the run ended: {ended.reason}")
    findings.add(not _leftovers(second), "nothing half-written is left")
    findings.add(same_weights(run_dir, undisturbed), SAME_BITS)
    return findings.result(recover=recover)


def _damaged(run_dir: Path) -> list[str]:
    """Return the names of incomplete checkpoints."""
    names = [name for name in checkpoints(run_dir) if re.fullmatch(r"step_\d+", name)]
    return [name for name in names if not is_complete(run_dir, int(name[5:]))]


def _leftovers(job: Job) -> list[str]:
    return [name for name in checkpoints(job.run_dir) if name.endswith(".tmp")]
