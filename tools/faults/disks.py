"""Full disks, and a read-only one: small file systems that only the run sees."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from faults.fixtures import SFT_STEPS, STEPS, Fixtures, run_rows
from faults.job import ROOT, Job, UnexpectedOutcome, read_run_metrics, shortened
from faults.points import Point
from faults.results import Findings, RowResult
from faults.saving import is_complete

FILLER = "filler"
_FULL_ERRORS = ("Errno 28", "No space", "Errno 27", "File too large")
"""Error texts of a full disk, and of RLIMIT_FSIZE in its place."""


@cache
def can_mount() -> bool:
    """Return whether this user may mount a file system in a namespace on this machine."""
    probe = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs none /tmp"]
    try:
        return subprocess.run(probe, capture_output=True).returncode == 0 and shutil.which("nsenter") is not None
    except OSError:
        return False


class Disk:
    """A file system at a folder, in a namespace that lives from `mount` to `close`: a small tmpfs, or without a size
    the existing one, made read-only. prefix: of commands that should see it. host_path: its path for this process."""

    def __init__(self, folder: Path, megabytes: int = 0) -> None:
        self.folder, self.megabytes = folder, megabytes
        pipe = subprocess.PIPE
        command = ["unshare", "-Urm", "sh", "-c", "echo there && exec cat"]
        self._namespace = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        assert self._namespace.stdout is not None
        self._namespace.stdout.readline()
        enter = ["nsenter", f"--target={self._namespace.pid}", "--user", "--mount", "--preserve-credentials"]
        self.prefix = [*enter, f"--wd={ROOT}"]
        self.host_path = Path(f"/proc/{self._namespace.pid}/root{folder}")

    def mount(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        read_only = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'
        script = f'mount -t tmpfs -o size={self.megabytes}m none "$1"' if self.megabytes else read_only
        process = subprocess.run([*self.prefix, "sh", "-c", script, "sh", self.folder], capture_output=True, text=True)
        if process.returncode:
            raise UnexpectedOutcome(f"no file system could be made at {self.folder}: {process.stderr.strip()}")

    def fill(self) -> None:
        with (self.host_path / FILLER).open("wb") as file:
            try:
                while True:
                    os.write(file.fileno(), bytes(1 << 16))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        (self.host_path / FILLER).unlink()

    def close(self) -> None:
        assert self._namespace.stdin is not None
        self._namespace.stdin.close()
        self._namespace.wait()


class Quota:
    """Stands in for a small disk where none can be mounted: a limit on the size of a process's files."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def fill(self) -> None:
        self._limit(1)

    def free(self) -> None:
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, limit: int) -> None:
        for pid in self.job.ranks().values():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def run_scenario(fixtures: Fixtures, row_numbers: Sequence[int]) -> Iterator[tuple[int, RowResult]]:
    yield from run_rows(fixtures, row_numbers, {12: _full_in_a_save, 13: _read_only, 28: _full_for_logs})


STAND_IN = "by RLIMIT_FSIZE, as nothing can be mounted here"
LINE = re.compile(r"ALARM: could not write checkpoint \S*(step_\d+): (.*)")


def _full_in_a_save(fixtures: Fixtures) -> RowResult:
    """Fill the disk of the checkpoints while the second one is written, and free it afterwards."""
    findings, run_dir = Findings(), fixtures.new_folder("row_12") / "run"
    folder = run_dir / "checkpoints"
    disk = Disk(folder, 150) if can_mount() else None
    points = [Point("begun", "forward", 1), Point("writing", "save:data", 2)]
    try:
        with fixtures.start_sft(run_dir, points, disk.prefix if disk else (), run__keep_checkpoints=2) as job:
            job.wait_for_point("begun")  # an existing folder of checkpoints would belong to another run
            if disk:
                disk.mount()
            job.release("begun")
            job.wait_for_point("writing")
            quota = disk or Quota(job)
            moment = time.time()
            quota.fill()
            job.release("writing")
            job.wait_for(lambda: LINE.search(job.log + job.output), "an alarm")
            detect = time.time() - moment
            location = disk.host_path if disk else folder
            view = location.parent
            findings.add(is_complete(view, 1), "the old checkpoint is intact")
            quota.free()
            ended = job.wait()
        match = LINE.search(job.log + job.output)
        assert match is not None
        findings.add(match[1] == "step_000002", f"alarm: {shortened(match[2], 90)}")
        findings.add(ended.status == 0 and len(job.metrics()) == SFT_STEPS, "training went on to its end", ended.reason)
        names = {path.name for path in location.iterdir()}
        expected = {f"step_{step:06d}" for step in (SFT_STEPS - 1, SFT_STEPS)}
        findings.add(names == expected | {"latest"}, "later checkpoints were written", f"there are {sorted(names)}")
        findings.add(all(is_complete(view, int(name[5:])) for name in expected), "and are whole")
        if disk is None:
            findings.add(True, STAND_IN)
        return findings.result(detect)
    finally:
        if disk:
            disk.close()


def _read_only(fixtures: Fixtures) -> RowResult:
    """Resume a run from checkpoints on a read-only disk."""
    findings, run_dir = Findings(), fixtures.new_folder("row_13") / "run"
    shutil.copytree(fixtures.undisturbed_sft(), run_dir)
    shutil.rmtree(run_dir / "export")
    folder = run_dir / "checkpoints"
    shutil.rmtree(folder / f"step_{SFT_STEPS:06d}")
    steps_before = len(read_run_metrics(run_dir))
    disk = Disk(folder) if can_mount() else None
    try:
        disk.mount() if disk else folder.chmod(0o500)
        with fixtures.start_sft(run_dir, (), disk.prefix if disk else (), run__resume="auto") as job:
            ended = job.wait()
        findings.add(ended.status == 2, "exit status 2", f"exit status {ended.status}")
        findings.add("checkpoints" in ended.reason, ended.reason)
        steps = len(job.metrics()) - steps_before
        findings.add(steps == 0, "before the first step", f"after {steps} steps")
        if disk is None:
            root = "root writes there all the same, and nothing can be mounted here"
            findings.add(os.getuid() != 0, "by its mode, as nothing can be mounted here", root)
        return findings.result(detect=ended.at - job.started_at)
    finally:
        if disk:
            disk.close()
        else:
            folder.chmod(0o700)


def _full_for_logs(fixtures: Fixtures) -> RowResult:
    """Fill the disk of the run folder from the first step on: metrics, log, TensorBoard, recorded rollouts."""
    findings, run_dir = Findings(), fixtures.new_folder("row_28") / "run"
    disk = Disk(run_dir, 20) if can_mount() else None
    single_rank = {"parallel__world_size": 1, "parallel__tp": 1, "parallel__ep": 1, "run__save_every": 0}
    try:
        if disk:
            disk.mount()
        with fixtures.start_replayed(
            run_dir,
            (),
            disk.prefix if disk else (),
            **single_rank,
            run__export=False,
            track__trackers=["tensorboard"],
        ) as job:
            if disk:
                job.seen_at = disk.host_path
            job.wait_for(job.metrics, "the first step")
            quota = disk or Quota(job)
            quota.fill()
            ended = job.wait()
        findings.add(ended.status == 0, "the run came to its end", f"the run ended: {ended.reason}")
        is_trained = f"step {STEPS}/{STEPS}" in job.output
        findings.add(
            is_trained, f"all {STEPS} steps were trained, as the terminal says", "the terminal does not say so"
        )
        messages = [
            line for line in (*ended.lines, *job.output.splitlines()) if "could not" in line or "No space" in line
        ]
        findings.add(
            bool(messages), f"said: {shortened(messages[0] if messages else '', 110)}", "nothing is said of it"
        )
        # Free space does not show that the disk was full: partly written files are removed, which makes room.
        full_then = any(reason in line for line in messages for reason in _FULL_ERRORS)
        written = f"{len(job.metrics())} of {STEPS} steps are in metrics.jsonl"
        findings.add(full_then, written, "the disk was not full")
        if disk is None:
            findings.add(True, STAND_IN)
        return findings.result(lost=0)
    finally:
        if disk:
            disk.close()
