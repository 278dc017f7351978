"""Run the ranks of a job as processes of this machine, end all of them when one fails, and restart the run.

Ranks report why they end (`exit_status.notify_launcher`) in memory that only processes of this user can open. The
launcher prints the root cause in one line, not the follow-up errors of ranks that lost a peer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Literal, TypeVar, get_args

from megarl.launch.exit_status import (
    LAUNCHER_ENV,
    REQUEUE_EXIT_CODE,
    RESTART_COUNT_ENV,
    SIGNAL_DEBOUNCE_S,
    ExitKind,
    RunOutcome,
    signal_name,
)
from megarl.launch.restarts import RestartDecision, RestartPolicy, append_to_log
from megarl.processes import memory_files
from megarl.processes.children import end_orphans, is_stopped, list_children

STOPPED_MARGIN_S = 15.0
"""Seconds added to `run.distributed_timeout_s`: ranks that detect the hang themselves can report more."""
_STOPPED_POLL_S = 1.0
_SUSPEND_GAP_S = 10.0
"""Seconds between two polls above which the launcher was suspended (Ctrl-Z, `scontrol suspend`), with its ranks."""
GRACE_S = 10.0
"""Seconds that ranks get to close their engines and files before they are killed."""
NOTICE_S = 3.0
"""Seconds that other ranks get to notice a failure themselves and to write down where they were."""
ORPHAN_TIMEOUT_S = 20.0
"""Seconds that orphaned processes get to exit before they are killed: engines that are shutting down."""
_POLL_S = 0.05
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_SIGNAL_HINTS = {
    "SIGKILL": " (the kernel does that when memory runs out)",
    "SIGBUS": " (for example when /dev/shm is full)",
    "SIGABRT": " (by a library that aborted; its last lines are above)",
}
_FAULT_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
"""Signals that a program causes itself."""


@dataclass(frozen=True)
class RankMessage:
    """Message of a rank at its end."""

    rank: int
    kind: ExitKind | Literal["run", "late"]
    """`run`: sent at its start (`exit_status.register_run`). `late`: from another rank; an empty text withdraws it."""
    text: str


class RankMessages:
    """Messages of ranks about why they end: JSON lines in a file of `processes/memory_files.py`.

    environment: tells the ranks where to write them. num_dropped: number of lines that were no valid message.
    """

    def __init__(self) -> None:
        self._file = memory_files.create("megarl-words")
        self.environment = {LAUNCHER_ENV: f"{os.getpid()}:{memory_files.build_path(self._file)}"}
        self._messages: list[RankMessage] = []
        self._partial_line = b""  # start of a line that is not complete yet
        self._offset = 0
        self._lock = threading.Lock()
        self.num_dropped = 0

    def read(self) -> list[RankMessage]:
        """Return all messages so far. Thread-safe."""
        with self._lock:
            while more := os.pread(self._file, 1 << 16, self._offset):
                self._offset += len(more)
                *lines, self._partial_line = (self._partial_line + more).split(b"\n")
                for line in filter(None, lines):
                    try:
                        self._messages.append(parse_message(line))
                    except (ValueError, TypeError, RecursionError):
                        self.num_dropped += 1
                        if self.num_dropped == 1:
                            text = f"warning: dropped {line[:80]!r}, which is not a message from a rank to its launcher"
                            print(text, file=sys.stderr, flush=True)
        return self._messages

    def restart_policy(self) -> RestartPolicy | None:
        """Return the restart policy that the run has registered, if any."""
        policies = [message for message in self._messages if message.kind == "run"]
        return RestartPolicy.from_json(policies[-1].text) if policies else None

    def add_late(self, rank: int, text: str) -> None:
        """Add a message about a rank that cannot report itself."""
        with self._lock:
            self._messages.append(RankMessage(rank, "late", text))

    def clear(self) -> None:
        """Discard the messages of ranks that have ended."""
        self.read()
        self._messages = []

    def close(self) -> None:
        os.close(self._file)


def parse_message(line: bytes) -> RankMessage:
    """Parse and validate a message. Raises ValueError, TypeError or RecursionError."""
    message = RankMessage(**json.loads(line))
    is_known = message.kind in (*get_args(ExitKind), "run", "late")
    if type(message.rank) is not int or message.rank < 0 or not is_known or not isinstance(message.text, str):
        raise ValueError("not the values of a message")
    if message.kind == "run":
        RestartPolicy.from_json(message.text)
    return message


def determine_outcome(
    codes: Mapping[int, int],
    messages: Sequence[RankMessage],
    stop_signal: int = 0,
    roles: Mapping[int, str] = MappingProxyType({}),
) -> RunOutcome:
    """Combine the ends of all ranks to one outcome.

    codes: exit code by rank, negative for a signal; without ranks that the launcher has killed. stop_signal: the signal
    by which all were asked to end. roles: description of ranks (role or node) for the error.
    """
    if codes and all(code in (0, REQUEUE_EXIT_CODE) for code in codes.values()):
        stopped = [message for message in messages if message.kind == "stopped"]
        if stopped:
            return RunOutcome(REQUEUE_EXIT_CODE, stopped[0].text, "stopped")
        return RunOutcome(max(codes.values()), "", "stopped" if REQUEUE_EXIT_CODE in codes.values() else "done")
    if stop_signal == signal.SIGINT:
        return RunOutcome(128 + stop_signal, f"ended by {signal_name(stop_signal)}", "asked")
    late = [message for message in messages if message.kind == "late"][-1:]
    messages = [message for message in messages if message.kind not in ("run", "late")]
    ranks_with_message = {message.rank for message in (*messages, *late) if message.text}
    silent = {rank: code for rank, code in codes.items() if rank not in ranks_with_message}
    signal_by_rank = {rank: -code for rank, code in silent.items() if code < 0 and -code != stop_signal}
    for rank, number in signal_by_rank.items():
        if number != signal.SIGABRT:  # also raised by libraries that lose a peer
            return _killed_outcome(rank, number, roles)
    for kind, status in (("mistake", 2), ("fault", 1)):
        for message in messages:
            if message.kind == kind:
                return RunOutcome(status, message.text, kind, message.rank)  # type: ignore[arg-type]
    if stop_signal:
        return RunOutcome(128 + stop_signal, f"ended by {signal_name(stop_signal)}", "asked")
    if late and late[0].text:
        return RunOutcome(1, late[0].text, "late", late[0].rank)
    for rank, number in signal_by_rank.items():
        return _killed_outcome(rank, number, roles)
    for rank, code in silent.items():
        if code > 0:
            text = f"error: {_describe_rank(rank, roles)} exited with status {code} without an error message"
            return RunOutcome(code, text, "fault", rank)
    for message in messages:
        if message.kind == "lost":
            return RunOutcome(1, message.text, "lost")
        if message.kind == "ended":  # not by us
            text = f"error: {_describe_rank(message.rank, roles)} was {message.text}"
            return RunOutcome(codes.get(message.rank, 1), text, "killed", message.rank)
    return RunOutcome(1, "error: the ranks did not exit in time and were killed", "lost")


def _killed_outcome(rank: int, number: int, roles: Mapping[int, str]) -> RunOutcome:
    name = signal_name(number)
    text = f"error: {_describe_rank(rank, roles)} was killed by {name}{_SIGNAL_HINTS.get(name, '')}"
    return RunOutcome(128 + number, text, "fault" if name in _FAULT_SIGNALS else "killed", rank)


def _describe_rank(rank: int, roles: Mapping[int, str]) -> str:
    return f"rank {rank} ({roles[rank]})" if rank in roles else f"rank {rank}"


class RankSupervisor(ABC):
    """Passes signals on to the ranks of this machine, ends all of them once one has failed, and kills those that stay.

    saves_on_sigterm: the first SIGTERM makes ranks save, without a time limit. grace: seconds that interrupted ranks
    have to exit.
    """

    def __init__(self, saves_on_sigterm: bool = True, grace: float = GRACE_S) -> None:
        self.saves_on_sigterm, self.grace = saves_on_sigterm, grace
        self.messages = RankMessages()
        self.stop_signal = 0
        """The signal by which the run was asked to stop."""
        self._last_signal_times: dict[int, float] = {}
        self._is_asked_twice = False  # two stop signals have been forwarded
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Reset the state for ranks that start now."""
        self.messages.clear()
        self.killed: set[int] = set()
        self._deadline = self.notice_deadline = float("inf")
        self._stopped_since: dict[int, float] = {}
        self._last_look = 0.0
        self._has_killed_stopped = False

    @abstractmethod
    def running_pids(self) -> dict[int, int]:
        """Return the pids of the running ranks, by rank."""

    @abstractmethod
    def has_failed_rank(self) -> bool:
        """Return whether a rank has failed for which the others must end."""

    def signal_all(self, number: int) -> set[int]:
        """Send a signal to all running ranks and return them."""
        running = self.running_pids()
        for pid in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return set(running)

    def forward_signal(self, number: int) -> bool:
        """Handle a signal that this process has received. Return False if it repeats a recent one."""
        now = time.monotonic()
        if now - self._last_signal_times.get(number, float("-inf")) < SIGNAL_DEBOUNCE_S:
            return False  # sent twice, as by `timeout`
        self._last_signal_times[number] = now
        if self.stop_signal and self._deadline < float("inf"):
            self._deadline = 0.0  # second request
        elif number == signal.SIGINT or not self.saves_on_sigterm or self._is_asked_twice:
            self._interrupt_all()
        else:
            self.signal_all(number)  # a second one ends ranks, except those writing a checkpoint
            self._is_asked_twice = self.stop_signal != 0
        self.stop_signal = self.stop_signal if self.stop_signal == signal.SIGINT else number
        return True

    def poll(self) -> None:
        """Read messages and enforce the deadlines. Call this repeatedly."""
        self.messages.read()
        now = time.monotonic()
        if now - self._last_look >= _STOPPED_POLL_S:
            self._kill_stopped_rank(now)
        if self.notice_deadline == float("inf") and self.has_failed_rank():
            self.notice_deadline = now + NOTICE_S
        if now > self.notice_deadline and self._deadline == float("inf"):
            self._interrupt_all()
        if now > self._deadline:
            self.killed |= self.signal_all(signal.SIGKILL)

    def _interrupt_all(self) -> None:
        self._deadline = min(self._deadline, time.monotonic() + self.grace)
        self.signal_all(signal.SIGINT)

    def _kill_stopped_rank(self, now: float) -> None:
        """Kill a rank that stays stopped (SIGSTOP), which others do not notice while they wait for storage."""
        policy = self.messages.restart_policy()
        if policy is None or self._has_killed_stopped:
            return
        if now - self._last_look > _SUSPEND_GAP_S:
            self._stopped_since.clear()
        self._last_look = now
        for rank, pid in self.running_pids().items():
            if not is_stopped(pid):
                self._stopped_since.pop(pid, None)
                continue
            seconds = now - self._stopped_since.setdefault(pid, now)
            if seconds > policy.timeout_s + STOPPED_MARGIN_S:
                self._has_killed_stopped = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                reason = f"for {seconds:.0f} s, longer than run.distributed_timeout_s={policy.timeout_s:g}"
                self.messages.add_late(rank, f"error: rank {rank} has been stopped (SIGSTOP) {reason}, and was killed")
                return


class Launch(RankSupervisor):
    """One start of `command` as `world` ranks. pending: see `record_signals`. roles: see `determine_outcome`."""

    def __init__(
        self,
        command: Sequence[str],
        world: int,
        saves_on_sigterm: bool,
        grace: float = GRACE_S,
        roles: Mapping[int, str] = MappingProxyType({}),
        pending: list[int] | None = None,
    ) -> None:
        super().__init__(saves_on_sigterm, grace)
        self.command, self.world, self.roles = command, world, roles
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.pending: list[int] = [] if pending is None else pending

    def run(self, environment: Mapping[str, str]) -> tuple[RunOutcome, RestartPolicy | None]:
        """Run until all ranks have ended. Return the outcome and the run's restart policy."""
        try:
            # Signals are blocked until ranks handle them from their first line on, see `exit_status.catch_signals`.
            with block_signals(_FORWARDED_SIGNALS):
                for rank in range(self.world):
                    numbers = {"RANK": rank, "LOCAL_RANK": rank}
                    numbers |= {"WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
                    rank_variables = {name: str(number) for name, number in numbers.items()}
                    variables = {**os.environ, **environment, **self.messages.environment, **rank_variables}
                    self.ranks.append(subprocess.Popen(self.command, env=variables))
            while self.running_pids():
                self._forward_pending()
                self.poll()
                time.sleep(_POLL_S)
            self._forward_pending()  # signals that arrived in the meantime
            codes = {n: rank.returncode for n, rank in enumerate(self.ranks) if n not in self.killed}
            outcome = determine_outcome(codes, self.messages.read(), self.stop_signal, self.roles)
            return outcome, self.messages.restart_policy()
        finally:
            self.signal_all(signal.SIGKILL)
            for rank_process in self.ranks:
                rank_process.wait()
            self.messages.close()

    def running_pids(self) -> dict[int, int]:
        return {n: rank.pid for n, rank in enumerate(self.ranks) if rank.poll() is None}

    def has_failed_rank(self) -> bool:
        return any(rank.poll() not in (None, 0, REQUEUE_EXIT_CODE) for rank in self.ranks)

    def _forward_pending(self) -> None:
        while self.pending:
            number = self.pending.pop(0)
            if number == signal.SIGUSR1:
                self.signal_all(number)
            else:
                self.forward_signal(number)


Result = TypeVar("Result")


def run_with_restarts(
    attempt: Callable[[Mapping[str, str]], tuple[Result, RestartPolicy | None]],
    decide: Callable[[Result, RestartPolicy | None], RestartDecision],
    pending: Sequence[int] = (),
) -> int:
    """Run a job, with restarts, and return its exit status. If that is not 0, a line on stderr says why.

    attempt: starts all ranks with these environment variables and returns when they have ended. decide: decides what
    follows, once all descendants have ended, which this process must inherit. pending: see `record_signals`.
    """
    other_children, restarts = list_children(), 0
    while True:
        result, policy = attempt({RESTART_COUNT_ENV: str(restarts)})
        end_orphans(other_children, ORPHAN_TIMEOUT_S)
        decision = decide(result, policy)
        if decision.text:
            print(decision.text, file=sys.stderr, flush=True)
        if not decision.should_restart:
            return decision.status
        append_to_log(policy, decision.text.splitlines()[-1])
        deadline = time.monotonic() + decision.wait_s
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            for number in pending:
                if number != signal.SIGUSR1:
                    print(f"ended by {signal_name(number)}", file=sys.stderr, flush=True)
                    return 128 + number
        restarts += 1


@contextlib.contextmanager
def block_signals(numbers: Sequence[int]) -> Iterator[None]:
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


@contextlib.contextmanager
def record_signals(pending: list[int]) -> Iterator[None]:
    """Record signals in the list within the block instead of handling them."""

    def note(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    previous_handlers = {number: signal.getsignal(number) for number in _FORWARDED_SIGNALS}
    for number, handler in previous_handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
