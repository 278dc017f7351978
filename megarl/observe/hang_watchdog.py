"""Detect a hanging rank before the timeout that it causes, dump the stacks of all ranks, and name it and its node.

Each rank has a thread that notices when the main thread has made no progress for almost as long as a wait for other
ranks may take (`ranks.patience`). It notifies all ranks. Each writes the stacks of its threads to logs/rank_N.log, and
notes in the job's store whether it is waiting. For a rank that does not respond another one of its node takes over: it
sends the signal on which faulthandler dumps the stacks without Python, and reads the process's state from the kernel. A
process that was stopped can write nothing.

`standing` tells from a thread's stack whether it waits for other ranks. `Stragglers` finds the rank that the others
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

_WAITS = (
    "/torch/distributed/",
    "/megatron/core/pipeline_parallel/p2p_communication.py",
    "/megatron/core/distributed/",
    "/megarl/parallel/collectives.py",
    "/megarl/parallel/row_exchange.py",
    "/megarl/parallel/node_links.py",
)
"""Files whose functions, where they are the innermost, wait for messages of other ranks."""


class Standing(NamedTuple):
    """waits: for other ranks. where: the innermost place of ours, in words."""

    waits: bool
    where: str


def standing(thread: int) -> Standing:
    """Of a thread, by its ident."""
    frame = sys._current_frames().get(thread)
    waits = frame is not None and any(part in frame.f_code.co_filename for part in _WAITS)
    found: FrameType | None = frame
    while found is not None and not _is_ours(found.f_code.co_filename):
        found = found.f_back
    shown = found or frame
    if shown is None:
        return Standing(False, "nowhere")
    code = shown.f_code
    return Standing(waits, f"{code.co_filename}, line {shown.f_lineno}, in {code.co_name}")


def _is_ours(file: str) -> bool:
    return "/megarl/" in file and "/megarl/parallel/" not in file


SLOW = 3.0
"""So many times as long as the others' median a rank must work in a phase to be named."""
LEAST_S = 0.2
"""And so many seconds longer."""
IN_A_ROW = 2
"""Steps in which it must do so, one after another: once may be a page from disk."""


def slowest(worked: Sequence[Mapping[str, float]]) -> tuple[int, str, float, float] | None:
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


class Stragglers:
    """Names a rank that is slow for some steps, once, and says when it no longer is. nodes: of each rank, by name."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._row: list[int] = []
        self._named = -1

    def look(self, step: int, worked: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], str]:
        """The figures of a step, and a line where there is something to say; the same on all ranks."""
        found = slowest(worked)
        if found is None:
            return {}, ""
        rank, phase, seconds, usual = found
        ratio = seconds / max(usual, 1e-3)
        slow = ratio >= SLOW and seconds - usual >= LEAST_S
        self._row = [*self._row, rank][-IN_A_ROW:] if slow else []
        figures = {"perf/slowest_rank": float(rank), "perf/slowest_ratio": ratio}
        line = ""
        if len(self._row) == IN_A_ROW and set(self._row) == {rank} and rank != self._named:
            self._named = rank
            line = (
                f"step {step}: rank {rank} on node {self._nodes[rank]} is slow, and the others wait for it: "
                f"{seconds:.1f} s of work in {phase}, {ratio:.1f} times as much as the others' {usual:.1f} s"
            )
        elif not slow and self._named >= 0:
            line = f"step {step}: rank {self._named} on node {self._nodes[self._named]} is as fast as the others again"
            self._named = -1
        return figures, line


SAMPLE_S = 0.05
LOOK_S = 0.5
ANSWER_S = 1.5
"""How long a rank may take to say where it stands, before one beside it does."""
WRITE_S = 0.7
"""How long it may take to write its stacks at the signal."""
COLLECT_S = 5.0
_KEY = "megarl/hang"
_STATES = {
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


class Lookout(threading.Thread):
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
        self._job, self._clock, self._roles, self._alarm, self._tell = job, clock, roles, alarm, tell
        self._main = threading.main_thread().ident or 0
        self._logs = run_dir / "logs"
        self._logs.mkdir(exist_ok=True)
        self._log: IO[str] = self._file(job.rank).open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=self._log, all_threads=True, chain=False)
        known: list[tuple[str, int]] = ranks.all_gather_objects((node.name(), os.getpid()))
        self.nodes = [name for name, _ in known]
        self._beside: dict[int, tuple[int, int]] = {}
        """Pid and a handle on it, which no later process of the same pid can have, of the other ranks of this node."""
        for rank, (name, pid) in enumerate(known):
            if name == self.nodes[job.rank] and rank != job.rank:
                with contextlib.suppress(OSError):  # it has ended
                    self._beside[rank] = pid, os.pidfd_open(pid)
        ranks.barrier()  # each has its faulthandler
        self._store: Any = rendezvous.further_connection()
        self._worked: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stragglers = Stragglers(self.nodes)
        self._number = 0
        self._collecting = threading.Event()
        self._told = False
        self._closing = threading.Event()

    def lap(self) -> dict[str, float]:
        """Seconds since the last call in which the main thread was at work and did not wait for others, by phase."""
        with self._lock:
            found, self._worked = self._worked, {}
        return found

    def look(self, step: int) -> tuple[dict[str, float], str]:
        """A step is done: its figures of how ranks compare, and a line where there is something to say. Collective."""
        worked = ranks.all_gather_objects(self.lap())
        if self._told:  # and yet all have come here
            self._told = False
            self._tell(self._job.rank, "")
        return self._stragglers.look(step, worked)

    def settle(self) -> None:
        """This rank ends: wait until all is collected that is being collected."""
        deadline = time.monotonic() + COLLECT_S + LOOK_S
        while self._collecting.is_set() and time.monotonic() < deadline:
            time.sleep(SAMPLE_S)

    def close(self) -> None:
        self._closing.set()
        self.join(COLLECT_S)
        faulthandler.unregister(signal.SIGUSR2)
        with contextlib.suppress(ValueError):  # not the main thread, by which such a signal is not to be had either
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # of one that has seen us hang
        self._log.close()
        for _, handle in self._beside.values():
            os.close(handle)
        self._beside = {}
        file = self._file(self._job.rank)
        with contextlib.suppress(OSError):
            if not file.stat().st_size:
                file.unlink()

    def run(self) -> None:
        looked = since = last = time.monotonic()
        at, patience, raised = self._clock.at, ranks.patience(), 0.0
        while not self._closing.wait(SAMPLE_S):
            now = time.monotonic()
            self._sample(now - last)
            last = now
            if now - looked < LOOK_S:
                continue
            looked = now
            if (self._clock.at, ranks.patience()) != (at, patience):
                at, patience, since = self._clock.at, ranks.patience(), now
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it the job
                if now - since > patience - margin(patience) and raised != since:
                    raised = since
                    self._raise(now - since)
                elif self._store.check([f"{_KEY}/{self._number}"]):
                    self._answer()

    def _sample(self, seconds: float) -> None:
        phase, who = self._clock.at[:2]
        if who in self._roles and not standing(self._main).waits:
            with self._lock:
                self._worked[phase] = self._worked.get(phase, 0.0) + seconds

    def _raise(self, seconds: float) -> None:
        """All ranks are to say where they stand, and this one makes a line of it, unless another does already."""
        me = str(self._job.rank)
        number = self._number
        if self._store.compare_set(f"{_KEY}/{number}", "", me).decode() != me:
            return
        self._collecting.set()
        try:
            collecting = threading.Thread(target=self._collect, args=(number, seconds), daemon=True)
            collecting.start()
            self._answer()
            collecting.join(COLLECT_S + LOOK_S)
        finally:
            self._collecting.clear()

    def _answer(self) -> None:
        """Write this rank's stacks and say where it stands; speak for those beside it that do not."""
        number, self._number = self._number, self._number + 1
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} a rank hangs; the threads of this one:\n")
        self._log.flush()
        faulthandler.dump_traceback(self._log, all_threads=True)
        own = standing(self._main)
        self._say(number, self._job.rank, own, stacks=True)
        if self._store.add(f"{_KEY}/{number}/{self.nodes[self._job.rank]}", 1) != 1:
            return  # another one looks after this node
        deadline = time.monotonic() + ANSWER_S
        while (silent := self._silent(number, self._beside)) and time.monotonic() < deadline:
            time.sleep(SAMPLE_S)
        sizes = {rank: self._size(rank) for rank in silent}
        for rank in silent:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._beside[rank][1], signal.SIGUSR2)
        if silent:
            time.sleep(WRITE_S)
        for rank in silent:
            self._say(
                number, rank, Standing(False, _state(self._beside[rank][0])), self._size(rank) > sizes[rank], True
            )

    def _say(self, number: int, rank: int, place: Standing, stacks: bool, silent: bool = False) -> None:
        said = {**place._asdict(), "stacks": stacks, "silent": silent}
        name = f"{_KEY}/{number}/{rank}"
        self._store.set(name, seal(json.dumps(said).encode(), name))

    def _silent(self, number: int, of: Collection[int]) -> list[int]:
        return [rank for rank in of if not self._store.check([f"{_KEY}/{number}/{rank}"])]

    def _collect(self, number: int, seconds: float) -> None:
        """In a thread of its own. Make a line of what the ranks say, for people and for the launcher."""
        store = rendezvous.further_connection()
        every = [f"{_KEY}/{number}/{rank}" for rank in range(self._job.world)]
        deadline = time.monotonic() + COLLECT_S
        while not all(store.check([name]) for name in every) and time.monotonic() < deadline:
            time.sleep(SAMPLE_S)
        said = [_said(store, name) for name in every]
        late, line = summary(said, self.nodes, seconds, self._logs)
        self._alarm(line)
        if late is not None:
            self._told = True
            self._tell(late, f"error: {line}")

    def _file(self, rank: int) -> Path:
        return self._logs / f"rank_{rank}.log"

    def _size(self, rank: int) -> int:
        try:
            return self._file(rank).stat().st_size
        except OSError:
            return 0


def _said(store: Any, name: str) -> dict[str, Any] | None:
    """What a rank has said by this name; None where it has said nothing, or somebody else has."""
    if store.check([name]):
        with contextlib.suppress(ForgedError):
            return dict(json.loads(bytes(unseal(store.get(name), name))))
    return None


def summary(
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
        words = [f"rank {rank} on node {nodes[rank]} {_told(said[rank])}" for rank in late[:4]]
        more = f" and {len(late) - 4} more" if len(late) > 4 else ""
        line = f"the others have waited {seconds:.0f} s for {'; and for '.join(words)}{more}"
    else:
        places = [f"rank {rank} at {one['where']}" for rank, one in enumerate(said[:4]) if one is not None]
        line = f"all ranks have waited {seconds:.0f} s for each other: {'; '.join(places)}"
    without = [rank for rank, one in enumerate(said) if one is None or not one["stacks"]]
    missing = f", but for rank {', '.join(map(str, without))}, which could not write its own" if without else ""
    return late[0] if late else None, f"{line}. The stacks of all ranks are in {logs}/rank_N.log{missing}"


def _told(one: dict[str, Any] | None) -> str:
    if one is None:
        return "whose node says nothing"
    return f"which {one['where']}" if one["silent"] else f"which is at {one['where']}"


def _state(pid: int) -> str:
    """What the kernel says of a process, in words that can follow `which`."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "has ended"
    return _STATES.get(text.rpartition(")")[2].split()[0], "does not answer")
