"""Engines that die or hang, weight syncs that fail, signals and a hung tool, all in one run of two engines with one
fault in each faulty step. If a fault ends the run, it is resumed from its newest checkpoint."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from faults.fixtures import GROUPS, KEYS, SAMPLES, Fixtures, run_row
from faults.job import Job, JobExit, UnexpectedOutcome, read_text, shortened
from faults.judging import NOTES
from faults.points import Point
from faults.results import Findings, RowResult
from faults.saving import resumed_from
from faults.tooling import HANG, HUNG, SEEN
from megarl.launch.exit_status import REQUEUE_EXIT_CODE
from megarl.observe.rollout_log import is_complete, read_rollouts
from megarl.types import Rollout

HANGS = "rollout.hang_timeout"
HANG_S, TOOL_S, BUDGET_S = 30, 5, 120
"""Timeouts of the run: an engine's silence, a tool call; and the time that Slurm gives a job to save itself."""
TOLERANCE = 1e-3
"""Bound on the log-prob difference of engine and trainer for 95 % of the tokens; other weights differ by more."""
STEPS = {22: 1, 18: 2, 19: 3, 4: 4, 5: 6, 6: 8, 7: 10}
"""Step in which each row is injected; the step after it shows whether the engines work."""
LAST = 11


def run_scenario(fixtures: Fixtures, row_numbers: Sequence[int]) -> Iterator[tuple[int, RowResult]]:
    chain = Chain(fixtures, row_numbers)
    works: dict[int, Callable[[Chain, Findings, int], RowResult]] = {
        22: _hung_tool,
        18: _asked_to_stop,
        19: _asked_to_stop,
        4: _killed_engine,
        5: _hanging_engine,
        6: _broken_weight_sync,
        7: _flipped_bit,
    }
    try:
        for number, work in works.items():
            if number not in row_numbers:
                continue
            fixtures.say(f"row {number}")
            yield number, run_row(chain.row, work, number)
    finally:
        chain.close()


class Chain:
    """One run, across restarts."""

    def __init__(self, fixtures: Fixtures, row_numbers: Sequence[int]) -> None:
        self.fixtures, self.folder = fixtures, fixtures.new_folder("generating")
        self.notes, self.run_dir = self.folder / "notes", self.folder / "run"
        self.notes.mkdir()
        os.environ[NOTES] = str(self.notes)
        numbers = [STEPS[number] for number in row_numbers]
        self.points = [
            *(Point(f"save_{step}", "save:data", step) for step in (STEPS[18], STEPS[19]) if step in numbers),
            *(Point("weight_sync", "weight_sync", step) for step in (STEPS[6],) if step in numbers),
            *(Point("wire", "wire", step) for step in (STEPS[7],) if step in numbers),
        ]
        if 22 in row_numbers:
            (self.notes / HANG).touch()
        self.job: Job | None = None

    def alive(self) -> Job:
        """Return the running job; restart the run if it has ended."""
        if self.job is None or self.job.process.poll() is not None:
            limits = {HANGS: HANG_S} if HANGS in KEYS else {}
            self.job = self.fixtures.start_generated(
                self.run_dir,
                self.points,
                {"run.num_rollout": LAST, "rollout.tool_timeout": TOOL_S, "run.resume": "auto", **limits},
            )
        return self.job

    def close(self) -> None:
        if self.job is not None:
            self.job.kill_all()
        del os.environ[NOTES]

    def row(self, work: Callable[[Chain, Findings, int], RowResult], number: int) -> RowResult:
        self.alive()
        return work(self, Findings(), number)

    # --- where it is

    def rows(self) -> dict[int, dict[str, Any]]:
        """Return metrics of each step taken; of repeated steps, the last attempt."""
        return {row["step"]: row for row in self.alive_or_not().metrics() if "rollout/reward_mean" in row}

    def alive_or_not(self) -> Job:
        assert self.job is not None
        return self.job

    def rewarded(self) -> int:
        return len(read_text(self.notes / SEEN))

    def in_the_middle(self, step: int) -> None:
        """Wait until some answers of a step are done and others are not."""
        job = self.alive()
        job.wait_for(lambda: step == 1 or step - 1 in self.rows(), f"step {step - 1}")
        num_before = self.rewarded()
        job.wait_for(lambda: self.rewarded() >= num_before + 2, f"the first answers of step {step}")

    def wait_for_step(self, step: int) -> dict[str, Any]:
        """Wait for the end of a step."""
        self.alive_or_not().wait_for(lambda: step in self.rows(), f"the end of step {step}")
        return self.rows()[step]

    def rollouts(self, step: int) -> list[Rollout]:
        """Return the rollouts of a completed step, which are written in the background."""
        self.alive_or_not().wait_for(lambda: is_complete(self.run_dir, step), f"the rollouts of step {step}")
        return read_rollouts(self.run_dir, step)

    def engine(self, index: int = 0) -> psutil.Process:
        """Return the scheduler process of an engine: the first child of its server. Servers are forked by the tool's
        own host."""
        log = str(self.run_dir / "logs" / f"engine_{index}.log")
        candidates = [process for process in psutil.Process().children(recursive=True) if _writes_to(process, log)]
        servers = [process for process in candidates if len(process.children()) > 1]
        if not servers:
            raise UnexpectedOutcome(f"engine {index} is not there")
        server = max(servers, key=psutil.Process.create_time)
        return min(server.children(), key=psutil.Process.create_time)


def _writes_to(process: psutil.Process, log: str) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1") == log
    except OSError:
        return False


# --- tools and signals ------------------------------------------------------------------------------------------------


def _hung_tool(chain: Chain, findings: Findings, number: int) -> RowResult:
    step = STEPS[number]
    chain.wait_for_step(step)
    messages = [
        str(message["content"])
        for rollout in chain.rollouts(step)
        for message in rollout.messages
        if message["role"] == "tool"
    ]
    late = [text for text in messages if "stopped after" in text]
    findings.add(len(late) == 1, f"1 of {len(messages)} observations: {late[0] if late else ''}", f"{len(late)} say so")
    pid = int(read_text(chain.notes / HUNG) or 0)
    findings.add(pid > 0 and not os.path.exists(f"/proc/{pid}"), "its process was killed")
    aborted = _aborted(chain, step)
    findings.add(not aborted, "its conversation went on")
    return findings.result(detect=float(TOOL_S), lost=aborted)


def _asked_to_stop(chain: Chain, findings: Findings, number: int) -> RowResult:
    """Send the stop signal in two situations: while answers are running, and again while the run saves."""
    step, signal_ = STEPS[number], {18: signal.SIGUSR1, 19: signal.SIGTERM}[number]
    chain.in_the_middle(step)
    job = chain.alive()
    moment = job.send(job.process.pid, signal_)
    job.wait_for_point(f"save_{step}")
    time.sleep(max(0.0, moment + 3.0 - time.time()))
    again = job.send(job.process.pid, signal_)
    time.sleep(1.0)
    job.release(f"save_{step}")
    ended = job.wait()
    is_requeued = ended.status == REQUEUE_EXIT_CODE
    findings.add(
        is_requeued, f"exit status {ended.status}: {ended.reason}", f"exit status {ended.status}: {ended.reason}"
    )
    elapsed = ended.at - moment - 4.0  # minus the time that the tool held it
    findings.add(is_requeued and elapsed < BUDGET_S, f"{elapsed:.0f} s from the signal to the end, of {BUDGET_S}")
    second = chain.alive()
    second.wait_for(lambda: resumed_from(second.log)[-1:] == [step], f"a resume from step {step}")
    findings.add(True, f"goes on from step {step}: the save was completed")
    return findings.result(detect=again - moment, recover=time.time() - ended.at, lost=_aborted(chain, step))


# --- engines ----------------------------------------------------------------------------------------------------------


def _killed_engine(chain: Chain, findings: Findings, number: int) -> RowResult:
    chain.in_the_middle(STEPS[number])
    num_before = chain.rewarded()
    engine = chain.engine()
    engine.kill()
    return _recovered(chain, findings, number, time.time(), num_before)


def _hanging_engine(chain: Chain, findings: Findings, number: int) -> RowResult:
    chain.in_the_middle(STEPS[number])
    num_before = chain.rewarded()
    engine = chain.engine()
    engine.suspend()
    moment = time.time()
    try:
        chain.alive_or_not().wait_for(lambda: not engine.is_running() or _is_dead(engine), "the end of what hangs")
        elapsed = time.time() - moment
        findings.add(elapsed < 2 * HANG_S, f"killed after {elapsed:.0f} s")
        return _recovered(chain, findings, number, moment, num_before)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.kill()


def _is_dead(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _recovered(chain: Chain, findings: Findings, number: int, moment: float, num_before: int) -> RowResult:
    """Check that the step continued without its engine, and that the engine was restarted with the weights."""
    step, job = STEPS[number], chain.alive_or_not()
    detect = None

    def has_ended() -> bool:
        nonlocal detect
        if detect is None and _lost_line(job, moment):
            detect = time.time() - moment
        return step in chain.rows() or job.process.poll() is not None

    job.wait_for(has_ended, f"the end of step {step}")
    if not findings.add(step in chain.rows(), "the step was not lost", f"the run ended: {_end_reason(job)}"):
        return findings.result(detect, lost=None)
    recover = time.time() - moment
    again = chain.rewarded() - num_before
    expected = GROUPS * SAMPLES
    findings.add(again <= expected, f"{again} of {expected} answers came after it, those before it were kept")
    aborted = _aborted(chain, step)
    findings.add(not aborted, "all lost ones were generated again", f"{aborted} were aborted")
    _well(chain, findings, step + 1)
    return findings.result(detect, recover, lost=aborted)


def _well(chain: Chain, findings: Findings, step: int) -> None:
    """Check that in a step all engines have the trainer's weights, of one version."""
    row = chain.wait_for_step(step)
    far = row["rollout/logprob_diff_p95"]
    findings.add(
        far < TOLERANCE, f"in the next step log-probs are within {far:.0e} of the trainer's: it has the weights"
    )
    moved = max(row.get("actor/grad_norm", 0.0) for row in chain.rows().values())
    findings.add(moved > 1e-3, "which have moved", "NOTHING to tell weights apart by: they have not moved")
    rollouts = chain.rollouts(step)
    versions = {version for rollout in rollouts for version, _ in rollout.version_spans}
    findings.add(versions == {step - 1}, f"all tokens are by version {step - 1}", f"tokens are by versions {versions}")
    chain.engine(0), chain.engine(1)


def _lost_line(job: Job, since: float) -> str:
    """Return the log line about an engine lost after a moment."""
    for line in job.log.splitlines()[::-1]:
        try:
            logged_at = time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S"))
        except ValueError:
            continue
        if logged_at < since - 1:
            return ""
        if re.search(r"engine \d+ ", line) and re.search(r"lost|died|hangs|hung|not running|does not respond", line):
            return line
    return ""


def _end_reason(job: Job) -> str:
    """Return the reason of a run that has ended; empty if it is running."""
    return _ended(job).reason


def _aborted(chain: Chain, step: int) -> int:
    return sum(rollout.status == "aborted" for rollout in chain.rollouts(step))


# --- weight syncs ----------------------------------------------------------------------------------------------------


def _broken_weight_sync(chain: Chain, findings: Findings, number: int) -> RowResult:
    step, job = STEPS[number], chain.alive()
    job.wait_for_point("weight_sync")
    engine = chain.engine()
    engine.kill()
    moment = time.time()
    job.release("weight_sync")
    job.wait_for(lambda: step in chain.rows() or job.process.poll() is not None, f"the end of step {step}")
    if not findings.add(job.process.poll() is None, "the run went on", f"the run ended: {_ended(job).reason}"):
        return findings.result()
    recover = time.time() - moment
    _well(chain, findings, step + 1)
    return findings.result(recover=recover, lost=_aborted(chain, step + 1))


def _ended(job: Job) -> JobExit:
    return job.wait() if job.process.poll() is not None else JobExit(0, [], 0.0)


def _flipped_bit(chain: Chain, findings: Findings, number: int) -> RowResult:
    step, job = STEPS[number], chain.alive()
    flipped = job.wait_for_point("wire")
    ended = job.wait()
    findings.add(ended.status == 2, "exit status 2", f"exit status {ended.status}")
    match = re.search(r"arrived|checksum|hash|bits|other weights than were sent", ended.reason)
    is_named = bool(match) and f"version {step}" in ended.reason
    findings.add(is_named, shortened(ended.reason, 140), shortened(ended.reason, 140))
    after = chain.run_dir / "rollouts" / f"step_{step + 1:06d}"
    findings.add(not after.exists(), "nothing was generated with it")
    return findings.result(detect=ended.at - flipped["time"], lost=0)
