"""Resume checkpoints in another layout, and by another run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from faults.fixtures import SFT_STEPS, STEPS, Fixtures, run_rows
from faults.job import same_weights, shortened
from faults.results import Findings, RowResult
from faults.saving import resumed_from
from megarl.config import describe_ranges

TOLERANCE = 1e-6
LAYOUTS: dict[str, dict[str, int]] = {
    "1 rank": {"world_size": 1, "tp": 1, "ep": 1},
    "DP 2": {"world_size": 2, "tp": 1, "ep": 1},
    "EP 2": {"world_size": 2, "tp": 1, "ep": 2},
    "PP 2": {"world_size": 2, "tp": 1, "ep": 1, "pp": 2},
}
"""Layouts that resume a checkpoint of a run with TP 2 and EP 2."""


def run_scenario(fixtures: Fixtures, row_numbers: Sequence[int]) -> Iterator[tuple[int, RowResult]]:
    yield from run_rows(fixtures, row_numbers, {16: _layouts, 17: _other_runs})


def furthest(first_run: Path, second_run: Path) -> float:
    """Return the largest difference of two runs' exported weights; infinite if they have different tensors."""
    first, second = (load_file(path / "export" / "model.safetensors") for path in (first_run, second_run))
    if first.keys() != second.keys():
        return float("inf")
    return max(float(np.abs(first[name] - second[name]).max()) for name in first)


def copied(run: Path, place: Path, without: int = 0) -> Path:
    """Copy a run folder without its export, and without the checkpoint of a step."""
    shutil.copytree(run, place / "run")
    shutil.rmtree(place / "run" / "export")
    if without:
        shutil.rmtree(place / "run" / "checkpoints" / f"step_{without:06d}")
    return place / "run"


def _layouts(fixtures: Fixtures) -> RowResult:
    """Repeat the last step in each layout; in one, only export, which gives the same bits."""
    findings, undisturbed = Findings(), fixtures.undisturbed()
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        run_dir = copied(undisturbed, fixtures.new_folder(f"row_16_{number}"), without=STEPS)
        settings: dict[str, Any] = {f"parallel__{key}": value for key, value in layout.items()}
        with fixtures.start_replayed(run_dir, run__resume="auto", **settings) as job:
            ended = job.wait()
        if findings.add(ended.status == 0, f"{name} goes on", f"{name}: {ended.reason}"):
            far = furthest(run_dir, undisturbed)
            findings.add(far <= TOLERANCE, f"and is within {far:.0e}")
    run_dir = copied(undisturbed, fixtures.new_folder("row_16_export"))
    with fixtures.start_replayed(run_dir, run__resume="auto", parallel__tp=1, parallel__ep=1, parallel__pp=2) as job:
        findings.add(job.wait().status == 0 and same_weights(run_dir, undisturbed), "exported with PP 2: the same bits")
    return findings.result(lost=0)


def _other_runs(fixtures: Fixtures) -> RowResult:
    findings, undisturbed = Findings(), fixtures.undisturbed_sft()
    run_dir = copied(undisturbed, fixtures.new_folder("row_17"), without=SFT_STEPS)
    with fixtures.start_sft(run_dir, run__resume="auto", run__seed=2) as job:
        ended = job.wait()
    findings.add(ended.status == 2 and "run.seed" in ended.reason, f"another seed: {shortened(ended.reason, 100)}")
    data = fixtures.material / "sft.jsonl"
    original = data.read_text()
    try:
        data.write_text(original.replace("What is", "Tell me"))
        with fixtures.start_sft(run_dir, run__resume="auto") as job:
            ended = job.wait()
        findings.add(
            ended.status == 2 and not (run_dir / "export").exists(), f"other data: {shortened(ended.reason, 100)}"
        )
        if "forced" in describe_ranges()["run.resume"]:
            with fixtures.start_sft(run_dir, run__resume="forced") as job:
                ended = job.wait()
            resumed = resumed_from(job.log)[-1:]
            forced = ended.status == 0 and resumed == [SFT_STEPS - 1] and not same_weights(run_dir, undisturbed)
            findings.add(forced, "run.resume=forced goes on all the same", f"forced: {ended.reason}")
        else:
            findings.add(False, "", "nothing forces it")
    finally:
        data.write_text(original)
    return findings.result()
