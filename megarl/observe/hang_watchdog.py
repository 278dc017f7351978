"""Detect a hanging rank before the timeout that it causes, dump the stacks of all ranks, and name it and its node.

Each rank has a thread that notices when the main thread has made no progress for almost as long as a wait for other
ranks may take (`ranks.patience`). It notifies all ranks. Each writes the stacks of its threads to logs/rank_N.log, and
notes in the job's store whether it is waiting. For a rank that does not respond another one of its node takes over: it
sends the signal on which faulthandler dumps the stacks without Python, and reads the process's state from the kernel. A
process that was stopped can write nothing.

`standing` tells from a thread's stack whether it waits for other ranks. `StragglerDetector` finds the rank that the others
wait for step after step, from the time that each spends in the shared phases.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import FrameType
from typing import IO, Any, NamedTuple

from megarl.observe.clock import Clock
from megarl.parallel import ranks, rendezvous
from megarl.parallel.job_secret import ForgedError, seal, unseal
from megarl.processes import node

_WAIT_FILES = (
    "/torch/distributed/",
    "/megatron/core/pipeline_parallel/p2p_communication.py",
    "/megatron/core/distributed/",
    "/megarl/parallel/collectives.py",
    "/megarl/parallel/row_exchange.py",
    "/megarl/parallel/node_links.py",
)
"""Files whose functions, where they are the innermost, wait for messages of other ranks."""


class StackState(NamedTuple):
    """waits: for other ranks. where: the innermost place of ours, in words."""

    waits: bool
    where: str


def read_stack_state(thread: int) -> StackState:
    """Of a thread, by its ident."""
    frame = sys._current_frames().get(thread)
    waits = frame is not None and any(part in frame.f_code.co_filename for part in _WAIT_FILES)
    found: FrameType | None = frame
    while found is not None and not _is_ours(found.f_code.co_filename):
        found = found.f_back
    shown = found or frame
    if shown is None:
        return StackState(False, "nowhere")
    code = shown.f_code
    return StackState(waits, f"{code.co_filename}, line {shown.f_lineno}, in {code.co_name}")


def _is_ours(file: str) -> bool:
    return "/megarl/" in file and "/megarl/parallel/" not in file


SLOW_RATIO = 3.0
"""So many times as long as the others' median a rank must work in a phase to be named."""
MIN_EXCESS_S = 0.2
"""And so many seconds longer."""
SLOW_STEPS = 2
"""Steps in which it must do so, one after another: once may be a page from disk."""


def find_slowest(worked: Sequence[Mapping[str, float]]) -> tuple[int, str, float, float] | None:
    """The rank that has worked longest in comparison with the others, in which phase, for how many seconds, and the
    median of the others there; None where no phase has two ranks. worked: seconds by phase, of each rank."""
    found: tuple[float, tuple[int, str, float, float]] | None = None
    for phase in sorted({name for one in worked for name in one}):
        ranks = [rank for rank, one in enumerate(worked) if phase in one]
        if len(ranks) < 2:
            continue
        slow = max(ranks, key=lambda rank: worked[rank][phase])
        usual = median(worked[rank][phase] for rank in ranks if rank != slow)
        lost = worked[slow][phase] - usual
        if found is None or lost > found[0]:
            found = lost, (slow, phase, worked[slow][phase], usual)
    return found[1] if found else None


class StragglerDetector:
    """Names a rank that is slow for some steps, once, and says when it no longer is. nodes: of each rank, by name."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._recent_slowest: list[int] = []
        self._reported_rank = -1

    def check(self, step: int, worked: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], str]:
        """The figures of a step, and a line where there is something to say; the same on all ranks."""
        found = find_slowest(worked)
        if found is None:
            return {}, ""
        rank, phase, seconds, usual = found
        ratio = seconds / max(usual, 1e-3)
        slow = ratio >= SLOW_RATIO and seconds - usual >= MIN_EXCESS_S
        self._recent_slowest = [*self._recent_slowest, rank][-SLOW_STEPS:] if slow else []
        figures = {"perf/slowest_rank": float(rank), "perf/slowest_ratio": ratio}
        line = ""
        if (
            len(self._recent_slowest) == SLOW_STEPS
            and set(self._recent_slowest) == {rank}
            and rank != self._reported_rank
        ):
            self._reported_rank = rank
            line = (
                f"step {step}: rank {rank} on node {self._nodes[rank]} is slow, and the others wait for it: "
                f"{seconds:.1f} s of work in {phase}, {ratio:.1f} times as much as the others' {usual:.1f} s"
            )
        elif not slow and self._reported_rank >= 0:
            line = f"step {step}: rank {self._reported_rank} on node {self._nodes[self._reported_rank]} is as fast as the others again"
            self._reported_rank = -1
        return figures, line


SAMPLE_INTERVAL_S = 0.05
POLL_INTERVAL_S = 0.5
RESPONSE_TIMEOUT_S = 1.5
"""How long a rank may take to say where it stands, before one beside it does."""
DUMP_WAIT_S = 0.7
"""How long it may take to write its stacks at the signal."""
COLLECT_TIMEOUT_S = 5.0
_KEY = "megarl/hang"
_PROCESS_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel, for a disk, a network's file system or a device",
    "R": "computes, and lets no Python run",
    "S": "sleeps, and lets no Python run",
    "Z": "has ended",
    "X": "has ended",
}


def margin(patience: float) -> float:
    """How long before the time-out of others a rank is taken to hang; seconds."""
    return min(max(patience / 10, 3.0), 60.0, patience / 2)


class HangWatchdog(threading.Thread):
    """Made on all ranks together, of which there are several. clock: tells when the main thread has come further.
    roles: phases of whose work are compared between ranks. alarm: where a line goes that nobody may overlook, from
    whichever rank. tell: the launcher is told that this rank (first) is the cause of what follows; of none, with an
    empty text, that this is over."""

    def __init__(
        self,
        job: ranks.Job,
        run_dir: Path,
        clock: Clock,
        roles: Collection[str],
        alarm: Callable[[str], None],
        tell: Callable[[int, str], object],
    ) -> None:
        super().__init__(name="lookout", daemon=True)
        self._job, self._clock, self._roles, self._alarm, self._notify_launcher = job, clock, roles, alarm, tell
        self._main = threading.main_thread().ident or 0
        self._logs = run_dir / "logs"
        self._logs.mkdir(exist_ok=True)
        self._log: IO[str] = self._log_path(job.rank).open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=self._log, all_threads=True, chain=False)
        known: list[tuple[str, int]] = ranks.all_gather_objects((node.get_name(), os.getpid()))
        self.nodes = [name for name, _ in known]
        self._node_peers: dict[int, tuple[int, int]] = {}
        """Pid and a handle on it, which no later process of the same pid can have, of the other ranks of this node."""
        for rank, (name, pid) in enumerate(known):
            if name == self.nodes[job.rank] and rank != job.rank:
                with contextlib.suppress(OSError):  # it has ended
                    self._node_peers[rank] = pid, os.pidfd_open(pid)
        ranks.barrier()  # each has its faulthandler
        self._store: Any = rendezvous.open_store_connection()
        self._work_seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stragglers = StragglerDetector(self.nodes)
        self._report_number = 0
        self._collecting = threading.Event()
        self._is_notified = False
        self._closing = threading.Event()

    def lap(self) -> dict[str, float]:
        """Seconds since the last call in which the main thread was at work and did not wait for others, by phase."""
        with self._lock:
            found, self._work_seconds = self._work_seconds, {}
        return found

    def check_step(self, step: int) -> tuple[dict[str, float], str]:
        """A step is done: its figures of how ranks compare, and a line where there is something to say. Collective."""
        worked = ranks.all_gather_objects(self.lap())
        if self._is_notified:  # and yet all have come here
            self._is_notified = False
            self._notify_launcher(self._job.rank, "")
        return self._stragglers.check(step, worked)

    def drain(self) -> None:
        """This rank ends: wait until all is collected that is being collected."""
        deadline = time.monotonic() + COLLECT_TIMEOUT_S + POLL_INTERVAL_S
        while self._collecting.is_set() and time.monotonic() < deadline:
            time.sleep(SAMPLE_INTERVAL_S)

    def close(self) -> None:
        self._closing.set()
        self.join(COLLECT_TIMEOUT_S)
        faulthandler.unregister(signal.SIGUSR2)
        with contextlib.suppress(ValueError):  # not the main thread, by which such a signal is not to be had either
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # of one that has seen us hang
        self._log.close()
        for _, handle in self._node_peers.values():
            os.close(handle)
        self._node_peers = {}
        file = self._log_path(self._job.rank)
        with contextlib.suppress(OSError):
            if not file.stat().st_size:
                file.unlink()

    def run(self) -> None:
        looked = since = last = time.monotonic()
        at, patience, raised = self._clock.position, ranks.current_timeout(), 0.0
        while not self._closing.wait(SAMPLE_INTERVAL_S):
            now = time.monotonic()
            self._sample(now - last)
            last = now
            if now - looked < POLL_INTERVAL_S:
                continue
            looked = now
            if (self._clock.position, ranks.current_timeout()) != (at, patience):
                at, patience, since = self._clock.position, ranks.current_timeout(), now
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it the job
                if now - since > patience - margin(patience) and raised != since:
                    raised = since
                    self._report_hang(now - since)
                elif self._store.check([f"{_KEY}/{self._report_number}"]):
                    self._dump_stacks()

    def _sample(self, seconds: float) -> None:
        phase, who = self._clock.position[:2]
        if who in self._roles and not read_stack_state(self._main).waits:
            with self._lock:
                self._work_seconds[phase] = self._work_seconds.get(phase, 0.0) + seconds

    def _report_hang(self, seconds: float) -> None:
        """All ranks are to say where they stand, and this one makes a line of it, unless another does already."""
        me = str(self._job.rank)
        number = self._report_number
        if self._store.compare_set(f"{_KEY}/{number}", "", me).decode() != me:
            return
        self._collecting.set()
        try:
            collecting = threading.Thread(target=self._collect, args=(number, seconds), daemon=True)
            collecting.start()
            self._dump_stacks()
            collecting.join(COLLECT_TIMEOUT_S + POLL_INTERVAL_S)
        finally:
            self._collecting.clear()

    def _dump_stacks(self) -> None:
        """Write this rank's stacks and say where it stands; speak for those beside it that do not."""
        number, self._report_number = self._report_number, self._report_number + 1
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} a rank hangs; the threads of this one:\n")
        self._log.flush()
        faulthandler.dump_traceback(self._log, all_threads=True)
        own = read_stack_state(self._main)
        self._publish_state(number, self._job.rank, own, stacks=True)
        if self._store.add(f"{_KEY}/{number}/{self.nodes[self._job.rank]}", 1) != 1:
            return  # another one looks after this node
        deadline = time.monotonic() + RESPONSE_TIMEOUT_S
        while (silent := self._find_silent(number, self._node_peers)) and time.monotonic() < deadline:
            time.sleep(SAMPLE_INTERVAL_S)
        sizes = {rank: self._log_size(rank) for rank in silent}
        for rank in silent:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._node_peers[rank][1], signal.SIGUSR2)
        if silent:
            time.sleep(DUMP_WAIT_S)
        for rank in silent:
            self._publish_state(
                number,
                rank,
                StackState(False, _state(self._node_peers[rank][0])),
                self._log_size(rank) > sizes[rank],
                True,
            )

    def _publish_state(self, number: int, rank: int, place: StackState, stacks: bool, silent: bool = False) -> None:
        said = {**place._asdict(), "stacks": stacks, "silent": silent}
        name = f"{_KEY}/{number}/{rank}"
        self._store.set(name, seal(json.dumps(said).encode(), name))

    def _find_silent(self, number: int, of: Collection[int]) -> list[int]:
        return [rank for rank in of if not self._store.check([f"{_KEY}/{number}/{rank}"])]

    def _collect(self, number: int, seconds: float) -> None:
        """In a thread of its own. Make a line of what the ranks say, for people and for the launcher."""
        store = rendezvous.open_store_connection()
        every = [f"{_KEY}/{number}/{rank}" for rank in range(self._job.world)]
        deadline = time.monotonic() + COLLECT_TIMEOUT_S
        while not all(store.check([name]) for name in every) and time.monotonic() < deadline:
            time.sleep(SAMPLE_INTERVAL_S)
        said = [_read_state(store, name) for name in every]
        late, line = summarize_states(said, self.nodes, seconds, self._logs)
        self._alarm(line)
        if late is not None:
            self._is_notified = True
            self._notify_launcher(late, f"error: {line}")

    def _log_path(self, rank: int) -> Path:
        return self._logs / f"rank_{rank}.log"

    def _log_size(self, rank: int) -> int:
        try:
            return self._log_path(rank).stat().st_size
        except OSError:
            return 0


def _read_state(store: Any, name: str) -> dict[str, Any] | None:
    """What a rank has said by this name; None where it has said nothing, or somebody else has."""
    if store.check([name]):
        with contextlib.suppress(ForgedError):
            return dict(json.loads(bytes(unseal(store.get(name), name))))
    return None


def summarize_states(
    said: Sequence[dict[str, Any] | None], nodes: Sequence[str], seconds: float, logs: Path
) -> tuple[int | None, str]:
    """The rank that others wait for, None where they wait for each other, and the line on it. said: by rank, what was
    said of where it stands (`waits`, `where`, `stacks`, and `silent` of one that another spoke for); None of one whose
    whole node says nothing."""
    gone = [rank for rank, one in enumerate(said) if one is None]
    silent = [rank for rank, one in enumerate(said) if one is not None and one["silent"]]
    busy = [rank for rank, one in enumerate(said) if one is not None and not one["waits"]]
    late = gone or silent or busy
    if late:
        words = [f"rank {rank} on node {nodes[rank]} {_describe_state(said[rank])}" for rank in late[:4]]
        more = f" and {len(late) - 4} more" if len(late) > 4 else ""
        line = f"the others have waited {seconds:.0f} s for {'; and for '.join(words)}{more}"
    else:
        places = [f"rank {rank} at {one['where']}" for rank, one in enumerate(said[:4]) if one is not None]
        line = f"all ranks have waited {seconds:.0f} s for each other: {'; '.join(places)}"
    without = [rank for rank, one in enumerate(said) if one is None or not one["stacks"]]
    missing = f", but for rank {', '.join(map(str, without))}, which could not write its own" if without else ""
    return late[0] if late else None, f"{line}. The stacks of all ranks are in {logs}/rank_N.log{missing}"


def _describe_state(one: dict[str, Any] | None) -> str:
    if one is None:
        return "whose node says nothing"
    return f"which {one['where']}" if one["silent"] else f"which is at {one['where']}"


def _state(pid: int) -> str:
    """What the kernel says of a process, in words that can follow `which`."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "has ended"
    return _PROCESS_STATES.get(text.rpartition(")")[2].split()[0], "does not answer")
