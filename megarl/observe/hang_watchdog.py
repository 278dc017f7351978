"""Hang watchdog: detect a hanging rank before collectives time out, dump all stacks, and name the rank and its node.

A watchdog thread on each rank notices when the main thread has made no progress for almost the collective timeout
(`ranks.current_timeout`), and notifies all ranks. Each rank then writes the stacks of its threads to logs/rank_N.log
and publishes in the job's store whether it is waiting. For a rank that does not respond, another rank of its node steps
in: it sends the signal on which faulthandler dumps the stacks without Python, and reads the process state from the
kernel. A stopped process cannot write anything.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple

from megarl.observe.clock import Clock
from megarl.parallel import ranks, rendezvous
from megarl.parallel.job_secret import ForgedError, seal, unseal
from megarl.processes import node
from megarl.utils.garbage_collection import pause_gc

_WAIT_FILES = (
    "/torch/distributed/",
    "/megatron/core/pipeline_parallel/p2p_communication.py",
    "/megatron/core/distributed/",
    "/megarl/parallel/collectives.py",
    "/megarl/parallel/row_exchange.py",
    "/megarl/parallel/node_links.py",
)
"""Source files whose functions wait for other ranks when they are the innermost frame."""
_OUR_FILE = re.compile(r"^(?!.*/megarl/parallel/).*/megarl/")


class StackState(NamedTuple):
    """Whether a thread waits for other ranks, and a description of its innermost frame in MegaRL."""

    waits: bool
    where: str


def read_stack_state(thread: int) -> StackState:
    """Inspect the stack of the thread with this ident."""
    # CPython 3.11 before 3.11.9 deadlocks if a collection that starts in this call waits for another thread
    # (github.com/python/cpython/issues/106883).
    with pause_gc():
        frame = sys._current_frames().get(thread)
    if frame is None:
        return StackState(False, "nowhere")
    waits = any(part in frame.f_code.co_filename for part in _WAIT_FILES)
    frames = (caller for caller, _ in traceback.walk_stack(frame))
    innermost = next((caller for caller in frames if _OUR_FILE.search(caller.f_code.co_filename)), frame)
    code = innermost.f_code
    return StackState(waits, f"{code.co_filename}, line {innermost.f_lineno}, in {code.co_name}")


SLOW_RATIO = 3.0
"""A straggler takes at least this multiple of the other ranks' median time in a phase."""
MIN_EXCESS_S = 0.2
"""A straggler also exceeds that median by at least this much."""
SLOW_STEPS = 2
"""Consecutive slow steps before a rank is reported: a single one may be a page read from disk."""


def find_slowest(work_seconds: Sequence[Mapping[str, float]]) -> tuple[int, str, float, float] | None:
    """Return (rank, phase, seconds, median of the other ranks) for the largest excess over that median.

    work_seconds: seconds of work by phase, per rank. None if no phase has two ranks.
    """
    candidates = []
    for phase in sorted({name for seconds in work_seconds for name in seconds}):
        seconds_by_rank = {rank: seconds[phase] for rank, seconds in enumerate(work_seconds) if phase in seconds}
        if len(seconds_by_rank) > 1:
            slowest = max(seconds_by_rank, key=lambda rank: seconds_by_rank[rank])
            slowest_seconds = seconds_by_rank.pop(slowest)
            candidates.append((slowest, phase, slowest_seconds, median(seconds_by_rank.values())))
    return max(candidates, key=lambda candidate: candidate[2] - candidate[3], default=None)


class StragglerDetector:
    """Reports a rank once when it is slow for `SLOW_STEPS` steps, and again when it has recovered."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._recent_slowest: list[int] = []
        self._reported_rank = -1

    def check(self, step: int, work_seconds: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], str]:
        """Return the step's straggler metrics and a log line, empty if nothing changed; identical on all ranks."""
        slowest = find_slowest(work_seconds)
        if slowest is None:
            return {}, ""
        rank, phase, seconds, others_median = slowest
        ratio = seconds / max(others_median, 1e-3)
        is_slow = ratio >= SLOW_RATIO and seconds - others_median >= MIN_EXCESS_S
        self._recent_slowest = [*self._recent_slowest, rank][-SLOW_STEPS:] if is_slow else []
        metrics = {"perf/slowest_rank": float(rank), "perf/slowest_ratio": ratio}
        line = ""
        if self._recent_slowest == [rank] * SLOW_STEPS and rank != self._reported_rank:
            self._reported_rank = rank
            line = (
                f"step {step}: rank {rank} on node {self._nodes[rank]} is slow and delays the others: "
                f"{seconds:.1f} s of work in {phase}, {ratio:.1f} times as much as the others' {others_median:.1f} s"
            )
        elif not is_slow and self._reported_rank >= 0:
            node_name = self._nodes[self._reported_rank]
            line = f"step {step}: rank {self._reported_rank} on node {node_name} is no longer slow"
            self._reported_rank = -1
        return metrics, line


SAMPLE_INTERVAL_S = 0.05
POLL_INTERVAL_S = 0.5
RESPONSE_TIMEOUT_S = 1.5
"""Time for a rank to publish its state before another rank of its node does so for it."""
DUMP_WAIT_S = 0.7
"""Time for a signalled rank to write its stacks."""
COLLECT_TIMEOUT_S = 5.0
_KEY = "megarl/hang"
_PROCESS_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel for a disk, a network file system or a device",
    "R": "computes without releasing the GIL",
    "S": "sleeps without releasing the GIL",
    "Z": "has ended",
    "X": "has ended",
}


def margin(timeout: float) -> float:
    """Return how many seconds before the timeout a rank counts as hanging."""
    return min(max(timeout / 10, 3.0), 60.0, timeout / 2)


class HangWatchdog(threading.Thread):
    """Watchdog thread of one rank. The constructor is collective and needs several ranks.

    Args:
        clock: its `position` shows the main thread's progress.
        roles: categories of the phases whose duration is compared between ranks.
        alarm: raises an alarm from any rank.
        notify_launcher: tells the launcher that the given rank causes the failures that follow; an empty text withdraws
            this.
    """

    def __init__(
        self,
        job: ranks.Job,
        run_dir: Path,
        clock: Clock,
        roles: Collection[str],
        alarm: Callable[[str], None],
        notify_launcher: Callable[[int, str], object],
    ) -> None:
        super().__init__(name="lookout", daemon=True)
        self._job, self._clock, self._roles = job, clock, roles
        self._alarm, self._notify_launcher = alarm, notify_launcher
        self._main = threading.main_thread().ident or 0
        self._is_notified, self._collecting, self._closing = False, threading.Event(), threading.Event()
        self._logs = run_dir / "logs"
        self._logs.mkdir(exist_ok=True)
        self._log: IO[str] = self._log_path(job.rank).open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=self._log, all_threads=True, chain=False)
        processes: list[tuple[str, int]] = ranks.all_gather_objects((node.get_name(), os.getpid()))
        self.nodes = [name for name, _ in processes]
        self._node_peers: dict[int, tuple[int, int]] = {}
        """Pid and pidfd of the other ranks on this node; unlike a pid, a pidfd is never reused by a later process."""
        for rank, (name, pid) in enumerate(processes):
            if name == self.nodes[job.rank] and rank != job.rank:
                with contextlib.suppress(OSError):  # the process has ended
                    self._node_peers[rank] = pid, os.pidfd_open(pid)
        ranks.barrier()  # all ranks have registered their faulthandler
        self._store: Any = rendezvous.open_store_connection()
        self._work_seconds: dict[str, float] = {}
        """Seconds per phase in which the main thread worked rather than waited."""
        self._lock = threading.Lock()
        self._stragglers = StragglerDetector(self.nodes)
        self._report_number = 0

    def check_step(self, step: int) -> tuple[dict[str, float], str]:
        """Return straggler metrics and a log line (or "") for a finished step. Collective."""
        with self._lock:
            work_seconds, self._work_seconds = self._work_seconds, {}
        seconds_by_rank = ranks.all_gather_objects(work_seconds)
        if self._is_notified:  # but all ranks have reached this point
            self._is_notified = False
            self._notify_launcher(self._job.rank, "")
        return self._stragglers.check(step, seconds_by_rank)

    def drain(self) -> None:
        """Wait for a report in progress. Called before this rank exits."""
        deadline = time.monotonic() + COLLECT_TIMEOUT_S + POLL_INTERVAL_S
        while self._collecting.is_set() and time.monotonic() < deadline:
            time.sleep(SAMPLE_INTERVAL_S)

    def close(self) -> None:
        self._closing.set()
        self.join(COLLECT_TIMEOUT_S)
        faulthandler.unregister(signal.SIGUSR2)
        with contextlib.suppress(ValueError):  # not the main thread, which cannot set handlers
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # late signal of a rank that saw this one hang
        self._log.close()
        for _, handle in self._node_peers.values():
            os.close(handle)
        self._node_peers = {}
        file = self._log_path(self._job.rank)
        with contextlib.suppress(OSError):
            if not file.stat().st_size:
                file.unlink()

    def run(self) -> None:
        last_poll = last_progress = last_sample = time.monotonic()
        position, timeout, reported_at = self._clock.position, ranks.current_timeout(), 0.0
        while not self._closing.wait(SAMPLE_INTERVAL_S):
            now = time.monotonic()
            self._sample(now - last_sample)
            last_sample = now
            if now - last_poll < POLL_INTERVAL_S:
                continue
            last_poll = now
            if (self._clock.position, ranks.current_timeout()) != (position, timeout):
                position, timeout, last_progress = self._clock.position, ranks.current_timeout(), now
            with contextlib.suppress(RuntimeError):  # the store, and with it the job, has ended
                if now - last_progress > timeout - margin(timeout) and reported_at != last_progress:
                    reported_at = last_progress
                    self._report_hang(now - last_progress)
                elif self._store.check([f"{_KEY}/{self._report_number}"]):
                    self._dump_stacks()

    def _sample(self, seconds: float) -> None:
        phase, category = self._clock.position[:2]
        if category in self._roles and not read_stack_state(self._main).waits:
            with self._lock:
                self._work_seconds[phase] = self._work_seconds.get(phase, 0.0) + seconds

    def _report_hang(self, seconds: float) -> None:
        """Ask all ranks for their state and report it, unless another rank already does."""
        rank = str(self._job.rank)
        number = self._report_number
        if self._store.compare_set(f"{_KEY}/{number}", "", rank).decode() != rank:
            return
        self._collecting.set()
        try:
            collector = threading.Thread(target=self._collect, args=(number, seconds), daemon=True)
            collector.start()
            self._dump_stacks()
            collector.join(COLLECT_TIMEOUT_S + POLL_INTERVAL_S)
        finally:
            self._collecting.clear()

    def _dump_stacks(self) -> None:
        """Write this rank's stacks and publish its state; do so for silent ranks of this node too."""
        number, self._report_number = self._report_number, self._report_number + 1
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} a rank hangs; threads of this rank:\n")
        self._log.flush()
        faulthandler.dump_traceback(self._log, all_threads=True)
        self._publish_state(number, self._job.rank, read_stack_state(self._main), has_stacks=True)
        if self._store.add(f"{_KEY}/{number}/{self.nodes[self._job.rank]}", 1) != 1:
            return  # another rank takes care of this node
        deadline, silent = time.monotonic() + RESPONSE_TIMEOUT_S, list(self._node_peers)
        while silent and time.monotonic() < deadline:
            time.sleep(SAMPLE_INTERVAL_S)
            silent = [rank for rank in silent if not self._store.check([f"{_KEY}/{number}/{rank}"])]
        sizes = {rank: self._log_size(rank) for rank in silent}
        for rank in silent:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._node_peers[rank][1], signal.SIGUSR2)
        if silent:
            time.sleep(DUMP_WAIT_S)
        for rank in silent:
            state = StackState(False, _describe_process(self._node_peers[rank][0]))
            self._publish_state(number, rank, state, self._log_size(rank) > sizes[rank], is_silent=True)

    def _publish_state(
        self, number: int, rank: int, state: StackState, has_stacks: bool, is_silent: bool = False
    ) -> None:
        name, content = f"{_KEY}/{number}/{rank}", {**state._asdict(), "stacks": has_stacks, "silent": is_silent}
        self._store.set(name, seal(json.dumps(content).encode(), name))

    def _collect(self, number: int, seconds: float) -> None:
        """Collect the states of all ranks, raise the alarm and tell the launcher. Runs in a separate thread."""
        store = rendezvous.open_store_connection()
        names = [f"{_KEY}/{number}/{rank}" for rank in range(self._job.world)]
        deadline = time.monotonic() + COLLECT_TIMEOUT_S
        while not all(store.check([name]) for name in names) and time.monotonic() < deadline:
            time.sleep(SAMPLE_INTERVAL_S)
        states: list[dict[str, Any] | None] = [None] * len(names)
        for rank, name in enumerate(names):
            with contextlib.suppress(ForgedError):
                if store.check([name]):
                    states[rank] = json.loads(bytes(unseal(store.get(name), name)))
        culprit, line = summarize_states(states, self.nodes, seconds, self._logs)
        self._alarm(line)
        if culprit is not None:
            self._is_notified = True
            self._notify_launcher(culprit, f"error: {line}")

    def _log_path(self, rank: int) -> Path:
        return self._logs / f"rank_{rank}.log"

    def _log_size(self, rank: int) -> int:
        file = self._log_path(rank)
        return file.stat().st_size if file.exists() else 0


def summarize_states(
    states: Sequence[dict[str, Any] | None], nodes: Sequence[str], seconds: float, logs: Path
) -> tuple[int | None, str]:
    """Return the rank that the others wait for, None if all wait for each other, and a log line.

    Args:
        states: published state of each rank: `waits`, `where`, `stacks`, and `silent` if another rank published it.
            None if its whole node is silent.
    """
    unreachable = [rank for rank, state in enumerate(states) if state is None]
    silent = [rank for rank, state in enumerate(states) if state is not None and state["silent"]]
    busy = [rank for rank, state in enumerate(states) if state is not None and not state["waits"]]
    culprits = unreachable or silent or busy
    if culprits:
        places = {rank: "whose node does not respond" for rank in unreachable}
        places |= {
            rank: f"which {'' if state['silent'] else 'is at '}{state['where']}"
            for rank, state in enumerate(states)
            if state is not None
        }
        descriptions = [f"rank {rank} on node {nodes[rank]} {places[rank]}" for rank in culprits[:4]]
        more = f" and {len(culprits) - 4} more" if len(culprits) > 4 else ""
        line = f"the others have waited {seconds:.0f} s for {'; and for '.join(descriptions)}{more}"
    else:
        waiting = [f"rank {rank} at {state['where']}" for rank, state in enumerate(states[:4]) if state is not None]
        line = f"all ranks have waited {seconds:.0f} s for each other: {'; '.join(waiting)}"
    no_stacks = [rank for rank, state in enumerate(states) if state is None or not state["stacks"]]
    missing = f", but for rank {', '.join(map(str, no_stacks))}, which could not write its stacks" if no_stacks else ""
    return culprits[0] if culprits else None, f"{line}. The stacks of all ranks are in {logs}/rank_N.log{missing}"


def _describe_process(pid: int) -> str:
    """Describe the kernel's state of a process, worded to follow "which"."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "has ended"
    return _PROCESS_STATES.get(text.rpartition(")")[2].split()[0], "does not respond")
