"""Run the ranks of a job as processes of this machine. They start together; when one fails, the others are ended.

Ranks report why they end (`exit_status.notify_launcher`) in memory that only processes of this user can open. The
launcher prints the root cause in one line, not the follow-up errors of ranks that lost a peer.

`StoppedRankMonitor` detects ranks that were stopped by SIGSTOP if no other rank does. Ranks detect a hang themselves
(`observe/hang_watchdog.py`) after `run.distributed_timeout_s`, but not while they wait for storage, which has a much
longer timeout, and not if all of them are stopped.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Literal, get_args

from megarl.launch.exit_status import (
    LAUNCHER_ENV,
    REQUEUE_EXIT_CODE,
    RESTART_COUNT_ENV,
    SIGNAL_DEBOUNCE_S,
    ExitKind,
    RunOutcome,
    signal_name,
)
from megarl.launch.restarts import RestartPolicy, RestartTracker, append_to_log
from megarl.processes import memory_files
from megarl.processes.children import end_orphans, is_stopped, list_children

STOPPED_MARGIN_S = 15.0
"""Seconds added to `run.distributed_timeout_s`: ranks that detect the hang themselves can report more."""
_STOPPED_POLL_S = 1.0
_SUSPEND_GAP_S = 10.0
"""Seconds between two polls above which the launcher was suspended (Ctrl-Z, `scontrol suspend`), with its ranks."""


class StoppedRankMonitor:
    """Tracks how long each rank of a launcher has been stopped."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._last_poll = 0.0
        self._over = False

    def poll(self, ranks: Callable[[], Mapping[int, int]], policy: RestartPolicy | None) -> tuple[int, str] | None:
        """Kill a rank that has been stopped for too long and return it with a message; the launcher ends the others.

        ranks: returns the pids of the running ranks by rank. Call this repeatedly; most calls do nothing.
        """
        now = time.monotonic()
        if policy is None or self._over or now - self._last_poll < _STOPPED_POLL_S:
            return None
        if now - self._last_poll > _SUSPEND_GAP_S:
            self._since.clear()
        self._last_poll = now
        for rank, pid in ranks().items():
            if not is_stopped(pid):
                self._since.pop(pid, None)
                continue
            seconds = now - self._since.setdefault(pid, now)
            if seconds > policy.timeout_s + STOPPED_MARGIN_S:
                self._over = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                reason = f"for {seconds:.0f} s, longer than run.distributed_timeout_s={policy.timeout_s:g}"
                return rank, f"error: rank {rank} has been stopped (SIGSTOP) {reason}, and was killed"
        return None


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
    """Message of a rank at its end.

    Kind `run`: sent at its start (`exit_status.register_run`). Kind `late`: about this rank, from another; an empty
    text withdraws it.
    """

    rank: int
    kind: ExitKind | Literal["run", "late"]
    text: str


_KINDS = (*get_args(ExitKind), "run", "late")


class RankMessages:
    """Messages of ranks about why they end. `environment` tells the ranks where to write them.

    Ranks append JSON lines to a memory file of this process, which they open through /proc. The kernel permits that
    only to processes of this user, so that no other user can write to it or fill it up. Invalid messages are dropped
    and counted.
    """

    def __init__(self) -> None:
        self._file = memory_files.create("megarl-words")
        self.environment = {LAUNCHER_ENV: f"{os.getpid()}:{memory_files.build_path(self._file)}"}
        self._messages: list[RankMessage] = []
        self._partial_line = b""  # start of a line that is not complete yet
        self._offset = 0
        self._lock = threading.Lock()
        self.num_dropped = 0
        """Lines that were no valid message."""

    def read(self) -> list[RankMessage]:
        """Return all messages so far. Thread-safe."""
        with self._lock:
            while more := os.pread(self._file, 1 << 16, self._offset):
                self._offset += len(more)
                *lines, self._partial_line = (self._partial_line + more).split(b"\n")
                for line in filter(None, lines):
                    self._parse_line(line)
        return self._messages

    def _parse_line(self, line: bytes) -> None:
        try:
            self._messages.append(parse_message(json.loads(line)))
        except (ValueError, RecursionError):
            self.num_dropped += 1
            if self.num_dropped == 1:
                text = f"warning: dropped {line[:80]!r}, which is not a message from a rank to its launcher"
                print(text, file=sys.stderr, flush=True)

    def restart_policy(self) -> RestartPolicy | None:
        """Return the restart policy that the run has registered, if any."""
        policies = [message for message in self._messages if message.kind == "run"]
        return RestartPolicy.from_json(policies[-1].text) if policies else None

    def add_late(self, report: tuple[int, str] | None) -> None:
        """Add a message about a rank that cannot report itself."""
        if report is not None:
            with self._lock:
                self._messages.append(RankMessage(report[0], "late", report[1]))

    def clear(self) -> None:
        """Discard the messages of ranks that have ended."""
        self.read()
        self._messages = []

    def close(self) -> None:
        os.close(self._file)


def parse_message(content: object) -> RankMessage:
    """Validate a message. Raises ValueError."""
    if not isinstance(content, dict) or set(content) != {"rank", "kind", "text"}:
        raise ValueError("not the fields of a word")
    rank, kind, text = content["rank"], content["kind"], content["text"]
    if type(rank) is not int or rank < 0 or kind not in _KINDS or not isinstance(text, str):
        raise ValueError("not the values of a word")
    if kind == "run":
        RestartPolicy.from_json(text)
    return RankMessage(rank, kind, text)


def determine_outcome(
    codes: Mapping[int, int],
    messages: Sequence[RankMessage],
    stop_signal: int = 0,
    roles: Mapping[int, str] = MappingProxyType({}),
) -> RunOutcome:
    """Combine the ends of all ranks to one outcome.

    codes: exit code by rank, negative for a signal; without ranks that the launcher has killed. asked: the signal with
    which all were asked to end. roles: description of ranks (role or node) for the error.
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
    signal_by_rank = {
        rank: -code
        for rank, code in codes.items()
        if code < 0 and rank not in ranks_with_message and -code != stop_signal
    }
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
    for rank, code in codes.items():
        if code > 0 and rank not in ranks_with_message:
            return RunOutcome(
                code,
                f"error: {_describe_rank(rank, roles)} exited with status {code} without an error message",
                "fault",
                rank,
            )
    for message in messages:
        if message.kind == "lost":
            return RunOutcome(1, message.text, "lost")
        if message.kind == "ended":  # not by us
            text = f"error: {_describe_rank(message.rank, roles)} was {message.text}"
            return RunOutcome(codes.get(message.rank, 1), text, "killed", message.rank)
    return RunOutcome(1, "error: the ranks did not exit in time and were killed", "lost")


def _killed_outcome(rank: int, number: int, roles: Mapping[int, str]) -> RunOutcome:
    name = signal_name(number)
    kind: Literal["fault", "killed"] = "fault" if name in _FAULT_SIGNALS else "killed"
    return RunOutcome(
        128 + number,
        f"error: {_describe_rank(rank, roles)} was killed by {name}{_SIGNAL_HINTS.get(name, '')}",
        kind,
        rank,
    )


def _describe_rank(rank: int, roles: Mapping[int, str]) -> str:
    return f"rank {rank} ({roles[rank]})" if rank in roles else f"rank {rank}"


class Launch:
    """One start of `command` as `world` ranks.

    saves_on_sigterm: the first SIGTERM makes ranks save, without a time limit. pending: list of received signals, see
    `record_signals`. roles: see `determine_outcome`.
    """

    def __init__(
        self,
        command: Sequence[str],
        world: int,
        saves_on_sigterm: bool,
        grace: float = GRACE_S,
        roles: Mapping[int, str] = MappingProxyType({}),
        pending: list[int] | None = None,
    ) -> None:
        self.command, self.world, self.saves, self.grace, self.roles = command, world, saves_on_sigterm, grace, roles
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.pending: list[int] = [] if pending is None else pending  # received signals
        self.stop_signal = 0
        self.deadline = float("inf")
        self.failed_at = float("inf")
        self._last_signal_times: dict[int, float] = {}
        self._is_asked_twice = False  # two stop signals have been forwarded
        self._stopped_monitor = StoppedRankMonitor()

    def run(self, environment: Mapping[str, str]) -> tuple[RunOutcome, RestartPolicy | None]:
        """Run until all ranks have ended. Return the outcome and the run's restart policy."""
        messages = RankMessages()
        killed: set[int] = set()
        try:
            self._start({**environment, **messages.environment})
            while any(rank.poll() is None for rank in self.ranks):
                self._poll()
                messages.read()
                messages.add_late(self._stopped_monitor.poll(self._running_pids, messages.restart_policy()))
                if time.monotonic() > self.deadline:
                    killed |= self._signal_all(signal.SIGKILL)
                time.sleep(_POLL_S)
            self._poll()  # signals that arrived in the meantime
            codes = {n: rank.returncode for n, rank in enumerate(self.ranks) if n not in killed}
            return determine_outcome(codes, messages.read(), self.stop_signal, self.roles), messages.restart_policy()
        finally:
            self._signal_all(signal.SIGKILL)
            for rank in self.ranks:
                rank.wait()
            messages.close()

    def _start(self, environment: Mapping[str, str]) -> None:
        # Signals are blocked until ranks handle them from their first line on, see `exit_status.catch_signals`.
        with block_signals(_FORWARDED_SIGNALS):
            for rank in range(self.world):
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
                rank_variables = {name: str(number) for name, number in numbers.items()}
                self.ranks.append(subprocess.Popen(self.command, env={**os.environ, **environment, **rank_variables}))

    def _poll(self) -> None:
        """Forward received signals; end all ranks once one has failed."""
        while self.pending:
            number = self.pending.pop(0)
            if number == signal.SIGUSR1:
                self._signal_all(number)
                continue
            if time.monotonic() - self._last_signal_times.get(number, 0.0) < SIGNAL_DEBOUNCE_S:
                continue  # sent twice, as by `timeout`
            self._last_signal_times[number] = time.monotonic()
            if self.stop_signal and self.deadline < float("inf"):
                self.deadline = 0.0  # second request
            elif number == signal.SIGINT or not self.saves or self._is_asked_twice:
                self._end()
            else:
                self._signal_all(number)  # a second one ends ranks, except those writing a checkpoint
                self._is_asked_twice = self.stop_signal != 0
            self.stop_signal = self.stop_signal if self.stop_signal == signal.SIGINT else number
        failed = any(rank.poll() not in (None, 0, REQUEUE_EXIT_CODE) for rank in self.ranks)
        if failed:
            self.failed_at = min(self.failed_at, time.monotonic())
            if time.monotonic() - self.failed_at > NOTICE_S and self.deadline == float("inf"):
                self._end()

    def _end(self) -> None:
        self._signal_all(signal.SIGINT)
        self.deadline = time.monotonic() + self.grace

    def _running_pids(self) -> dict[int, int]:
        return {n: rank.pid for n, rank in enumerate(self.ranks) if rank.poll() is None}

    def _signal_all(self, number: int) -> set[int]:
        """Send a signal to all running ranks and return them."""
        running = {n: rank for n, rank in enumerate(self.ranks) if rank.poll() is None}
        for rank in running.values():
            rank.send_signal(number)
        return set(running)


def run_with_restarts(
    attempt: Callable[[Mapping[str, str]], tuple[RunOutcome, RestartPolicy | None]], pending: list[int]
) -> int:
    """Run a job, with restarts as `restarts.py` decides, and return its exit status.

    If the status is not 0, a line on stderr says why. attempt: starts all ranks with these environment variables and
    returns when they have ended. pending: see `record_signals`.

    Before each restart and at the end, all descendant processes have been ended and their kernel resources freed. For
    that this process must inherit orphans (`processes/children.py`).
    """
    restarts, other_children = RestartTracker(), list_children()
    while True:
        outcome, rules = attempt({RESTART_COUNT_ENV: str(restarts.attempts)})
        end_orphans(other_children, ORPHAN_TIMEOUT_S)
        decision = restarts.decide(outcome, rules)
        if decision.text:
            print(decision.text, file=sys.stderr, flush=True)
        if not decision.should_restart:
            return decision.status
        append_to_log(rules, decision.text.splitlines()[-1])
        deadline = time.monotonic() + decision.wait_s
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            for number in pending:
                if number != signal.SIGUSR1:
                    print(f"ended by {signal_name(number)}", file=sys.stderr, flush=True)
                    return 128 + number


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
