"""Ranks that die, hang, or slow down, in a run of two ranks on recorded answers."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from faults.fixtures import KEYS, STEPS, Fixtures, run_rows
from faults.job import SAME_BITS, Job, JobExit, read_text, same_weights, shortened
from faults.points import Point
from faults.results import Findings, RowResult

RESTARTS = "run.max_restarts"
TIMEOUT_S = 20
FAULT_STEP = 3
"""Step of the fault; a checkpoint of the step before exists."""


def run_scenario(fixtures: Fixtures, row_numbers: Sequence[int]) -> Iterator[tuple[int, RowResult]]:
    yield from run_rows(fixtures, row_numbers, {1: _forward, 2: _all_reduce, 3: _stopped, 29: _slowed})


def restarting(fixtures: Fixtures, name: str, points: Sequence[Point], **settings: Any) -> Job:
    """Start a run that restarts by itself, if this program can do that."""
    restart_settings: dict[str, Any] = {"run__max_restarts": 2} if RESTARTS in KEYS else {}
    return fixtures.start_replayed(
        fixtures.new_folder(name) / "run", points, run__distributed_timeout_s=TIMEOUT_S, **restart_settings, **settings
    )


def check_restart(fixtures: Fixtures, job: Job, ended: JobExit, findings: Findings, **settings: Any) -> None:
    """Check that the run has restarted by itself; otherwise resume it, as a person would."""
    if findings.add(ended.status == 0, "started again by itself", f"not started again by itself ({ended.reason})"):
        return
    with fixtures.start_replayed(
        job.run_dir, (), run__resume="auto", run__distributed_timeout_s=TIMEOUT_S, **settings
    ) as second:
        findings.add(second.wait().status == 0, "gone on with by hand")


def wait_for_exit(job: Job, pids: Sequence[int], since: float, seconds: float) -> float | None:
    """Return seconds until these processes have ended; None if they do not end in time."""
    deadline = time.time() + seconds
    while any(os.path.exists(f"/proc/{pid}") and _state(pid) != "Z" for pid in pids):
        if time.time() > deadline:
            return None
        time.sleep(0.02)
    return time.time() - since


def step_again(job: Job, step: int, since: float) -> float | None:
    """Return seconds from a moment until a step was completed."""
    rows = (row for row in job.metrics() if row["step"] >= step and row["time"] > since)
    return next((row["time"] - since for row in rows), None)


def _forward(fixtures: Fixtures) -> RowResult:
    return _killed(fixtures, "forward")


def _all_reduce(fixtures: Fixtures) -> RowResult:
    return _killed(fixtures, "all_reduce")


def _killed(fixtures: Fixtures, stage: str) -> RowResult:
    undisturbed, findings = fixtures.undisturbed(), Findings()
    with restarting(fixtures, f"killed_in_{stage}", [Point("there", stage, FAULT_STEP, rank=1)]) as job:
        pid = job.wait_for_point("there")["pid"]
        others = [other for rank, other in job.ranks().items() if other != pid]
        if stage == "all_reduce":
            time.sleep(0.3)  # the point is just before the all-reduce
        moment = job.send(pid, signal.SIGKILL)
        job.release("there")
        detect = wait_for_exit(job, others, moment, TIMEOUT_S + 30)
        findings.add(
            detect is not None and detect <= TIMEOUT_S,
            f"its peer ended after {detect or 0:.1f} s",
            f"its peer did not end within the {TIMEOUT_S} s of run.distributed_timeout_s",
        )
        ended = job.wait()
        check_restart(fixtures, job, ended, findings)
        findings.add(same_weights(job.run_dir, undisturbed), SAME_BITS)
        return findings.result(detect, step_again(job, FAULT_STEP, moment), lost=0)


def _stopped(fixtures: Fixtures) -> RowResult:
    undisturbed, findings = fixtures.undisturbed(), Findings()
    with restarting(fixtures, "row_3", [Point("there", "forward", FAULT_STEP, rank=1)]) as job:
        job.wait_for_point("there")
        ranks = job.ranks()
        moment = job.send(ranks[1], signal.SIGSTOP)
        job.release("there")
        detect = wait_for_exit(job, [ranks[0]], moment, 3 * TIMEOUT_S + 30)
        findings.add(
            detect is not None and detect <= TIMEOUT_S + 10,
            f"its peer ended after {detect or 0:.1f} s with run.distributed_timeout_s={TIMEOUT_S}",
            f"not detected within run.distributed_timeout_s={TIMEOUT_S}",
        )
        ended = job.wait()
        output = "\n".join([job.log, job.output, *ended.lines])
        findings.add(bool(re.search(r"rank 1\b", output)), "rank 1 is named", "rank 1 is not named")
        stacks = [file for file in job.run_dir.rglob("*") if file.is_file() and _is_stacks(read_text(file))]
        findings.add(
            bool(stacks),
            f"stacks of ranks are in {', '.join(file.name for file in stacks[:3])}",
            "no stacks were written",
        )
        check_restart(fixtures, job, ended, findings)
        findings.add(same_weights(job.run_dir, undisturbed), SAME_BITS)
        return findings.result(detect, step_again(job, FAULT_STEP, moment), lost=0)


def _is_stacks(text: str) -> bool:
    """Return whether the text is a stack dump of a running thread, by faulthandler or py-spy."""
    return 'File "' in text and ("Thread 0x" in text or "most recent call first" in text)


def _slowed(fixtures: Fixtures) -> RowResult:
    """Slow a rank to a tenth of its speed: stop and continue it, 20 times per second."""
    findings = Findings()
    overrides: dict[str, Any] = {"run__num_rollout": 2 * STEPS, "run__save_every": 0, "run__export": False}
    overrides |= {
        "parallel__tp": 1,
        "parallel__ep": 1,
        "rollout__replay": fixtures.longer_answers,
    }  # no tensor or expert parallelism: each rank works by itself
    with restarting(fixtures, "row_29", [], **overrides) as job:
        job.wait_for(lambda: job.metrics(), "the first step")
        slow = Slow(job.ranks()[1])
        try:
            ended = job.wait()
        finally:
            slow.stop()
        findings.add(ended.status == 0, "the run came to its end", f"the run ended: {ended.reason}")
        lines = [line for line in job.log.splitlines() if _names_straggler(line)]
        is_named = findings.add(
            bool(lines), f"said: {shortened(lines[0] if lines else '', 120)}", "rank 1 is not named"
        )
        named_at = slow.started_at + (0.0 if not is_named else max(0.0, _log_time(lines[0]) - slow.started_at))
        return findings.result(named_at - slow.started_at if is_named else None, lost=0)


def _names_straggler(line: str) -> bool:
    return bool(re.search(r"\brank 1\b", line) and re.search(r"slow|straggl|behind|times", line))


def _log_time(line: str) -> float:
    try:
        return time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S"))
    except ValueError:
        return time.time()


class Slow(threading.Thread):
    """Leaves a process a tenth of its time until `over`."""

    def __init__(self, pid: int, share: float = 0.1, period: float = 0.05) -> None:
        super().__init__(daemon=True)
        self.pid, self.share, self.period = pid, share, period
        self._stopped = threading.Event()
        self.started_at = time.time()
        self.start()

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                os.kill(self.pid, signal.SIGSTOP)
                self._stopped.wait(self.period * (1 - self.share))
                os.kill(self.pid, signal.SIGCONT)
                self._stopped.wait(self.period * self.share)
        except ProcessLookupError:
            pass

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        if _state(self.pid) == "T":
            os.kill(self.pid, signal.SIGCONT)


def _state(pid: int) -> str:
    """Return a process's state from /proc; empty if there is none."""
    status = read_status(pid)
    return status.rpartition(")")[2].split()[0] if status else ""


def read_status(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read()
    except OSError:
        return ""
