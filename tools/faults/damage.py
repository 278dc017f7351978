"""Checkpoints damaged on disk, one in each of four ways, and a second job at the same folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from faults.fixtures import SFT_STEPS, Fixtures
from faults.job import same_weights, shortened
from faults.points import Point
from faults.results import Findings, RowResult
from faults.saving import resumed_from


def shard(folder: Path) -> Path:
    """Return the largest file of the model in a checkpoint."""
    return max((folder / "actor").glob("*.distcp"), key=lambda path: path.stat().st_size)


def truncate(folder: Path) -> Path:
    file = shard(folder)
    os.truncate(file, file.stat().st_size // 2)
    return file


def flip_a_bit(folder: Path) -> Path:
    """Flip a bit in the middle of the file, in the tensor data."""
    file = shard(folder)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        (byte,) = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 0x10]))
    return file


def remove_shard(folder: Path) -> Path:
    file = shard(folder)
    file.unlink()
    return file


def remove_metadata(folder: Path) -> Path:
    file = folder / "actor" / ".metadata"
    file.unlink()
    return file


DAMAGE = {9: (truncate,), 10: (flip_a_bit,), 11: (remove_shard, remove_metadata)}
"""Damages by row, each to a checkpoint of its own."""


def run_scenario(fixtures: Fixtures, row_numbers: Sequence[int]) -> Iterator[tuple[int, RowResult]]:
    """Show all rows in one run: its newest checkpoints are damaged, and while it continues from an older one, another
    job wants its folder."""
    fixtures.say(f"rows {', '.join(map(str, row_numbers))}")
    undisturbed, run_dir = fixtures.undisturbed_sft(), fixtures.new_folder("damaged") / "run"
    shutil.copytree(undisturbed, run_dir)
    shutil.rmtree(run_dir / "export")
    step, damaged_files = SFT_STEPS, {number: [] for number in DAMAGE if number in row_numbers}  # type: ignore[var-annotated]
    for number, files in damaged_files.items():
        for damage in DAMAGE[number]:
            folder = run_dir / "checkpoints" / f"step_{step:06d}"
            files.append((folder, damage(folder).relative_to(folder)))
            step -= 1
    if step == SFT_STEPS:  # the newest checkpoint is intact: training is complete
        shutil.rmtree(run_dir / "checkpoints" / f"step_{step:06d}")
        step -= 1
    blocked = Point("held", "save:tmp", step + 1)
    with fixtures.start_sft(run_dir, [blocked], run__resume="auto") as job:
        job.wait_for_point("held")
        refused = None
        if 15 in row_numbers:
            with fixtures.start_sft(run_dir, run__resume="auto") as second:
                refused = second.wait()
                seconds = refused.at - second.started_at
        job.release("held")
        ended = job.wait()
    log, exact = job.log, same_weights(run_dir, undisturbed)
    fell_back = resumed_from(log)[-1:] == [step]
    for number, files in damaged_files.items():
        findings = Findings()
        for folder, file in files:
            lines = [line for line in log.splitlines() if f"skipping checkpoint {folder}" in line]
            message = shortened(lines[0].partition(f"{folder.name}: ")[2] if lines else "", 100)
            is_named = bool(lines) and str(file) in lines[0]
            findings.add(is_named, f"skipped: {message}", f"{file} is not named ({message or 'nothing is said'})")
        findings.add(fell_back, f"went on from step {step}", f"went on from {resumed_from(log)}")
        findings.add(ended.status == 0 and exact, "to the weights of the undisturbed run, bit for bit")
        yield number, findings.result()
    if refused is not None:
        findings = Findings()
        findings.add(refused.status == 2, "exit status 2", f"exit status {refused.status}")
        findings.add("in use by" in refused.reason, refused.reason)
        findings.add(ended.status == 0 and exact, "the first one was not disturbed")
        yield 15, findings.result(detect=seconds)
