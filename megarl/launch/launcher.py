"""Run the ranks of a job as processes of this machine. They start together, and when one fails the others are ended.

Ranks tell the launcher why they end (`exit_status.tell`), in memory that only processes of this user can open. The
launcher reports the first cause in one line, not what the other ranks saw of it: that a peer is gone.

`Stopped` notices ranks that were stopped by SIGSTOP where no other rank does. Ranks notice a hang themselves
(`observe/hang_watchdog.py`) after `run.timeout_s`, but while they wait for storage that takes much longer, and if all
of them are stopped nobody waits.
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
"""How long behind `run.timeout_s`: where others notice they know more."""
_STOPPED_POLL_S = 1.0
_SUSPEND_GAP_S = 10.0
"""Between two looks: the launcher was stopped itself, as by Ctrl-Z or `scontrol suspend`, and its ranks with it."""


class StoppedRankMonitor:
    """How long each rank of one launcher has been stopped."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._last_poll = 0.0
        self._over = False

    def poll(self, ranks: Callable[[], Mapping[int, int]], rules: RestartPolicy | None) -> tuple[int, str] | None:
        """Kill a rank that has been stopped for too long, after which the launcher ends the others; which one, and
        what is to be said of it. ranks: the pids of those that are there, by rank. To be called again and again; most
        times it does nothing."""
        now = time.monotonic()
        if rules is None or self._over or now - self._last_poll < _STOPPED_POLL_S:
            return None
        if now - self._last_poll > _SUSPEND_GAP_S:
            self._since.clear()
        self._last_poll = now
        for rank, pid in ranks().items():
            if not is_stopped(pid):
                self._since.pop(pid, None)
                continue
            seconds = now - self._since.setdefault(pid, now)
            if seconds > rules.timeout_s + STOPPED_MARGIN_S:
                self._over = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                why = f"for {seconds:.0f} s, longer than run.timeout_s={rules.timeout_s:g}"
                return rank, f"error: rank {rank} has been stopped (SIGSTOP) {why}, and was killed"
        return None


GRACE_S = 10.0
"""How long ranks that shall end now may take, to close their engines and files, before they are killed."""
NOTICE_S = 3.0
"""How long the others have to see by themselves that one has failed, and to write down where they were."""
ORPHAN_TIMEOUT_S = 20.0
"""How long what ranks have left behind may take to end, before it is killed: engines that are on their way out."""
_POLL_S = 0.05
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_SIGNAL_HINTS = {
    "SIGKILL": " (the kernel does that when memory is short)",
    "SIGBUS": " (for example where /dev/shm is full)",
    "SIGABRT": " (by a library that gave up; its last lines are above)",
}


_FAULT_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
"""Signals that a program brings upon itself."""


@dataclass(frozen=True)
class RankMessage:
    """What a rank said at its end; of kind `run`, what it said at its beginning (`ending.register_run`); of kind `late`,
    what was said of it by another; without a text, that this is over."""

    rank: int
    kind: ExitKind | Literal["run", "late"]
    text: str


_KINDS = (*get_args(ExitKind), "run", "late")


class RankMessages:
    """Where ranks say why they end. `environment` tells them where that is.

    Ranks append lines of JSON to a memory file of this process, which they open through /proc. The kernel lets only
    processes of this user do that, so that no other user can say something or fill it up. What is no `RankMessage` is dropped
    and counted.
    """

    def __init__(self) -> None:
        self._file = memory_files.create("megarl-words")
        self.environment = {LAUNCHER_ENV: f"{os.getpid()}:{memory_files.build_path(self._file)}"}
        self._messages: list[RankMessage] = []
        self._partial_line = b""  # of a line whose end has not been written yet
        self._offset = 0
        self._lock = threading.Lock()
        self.num_dropped = 0
        """Lines that were no word."""

    def read(self) -> list[RankMessage]:
        """All that has been said; in any thread."""
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
                text = f"warning: dropped {line[:80]!r}, which is no message of a rank to its launcher"
                print(text, file=sys.stderr, flush=True)

    def restart_policy(self) -> RestartPolicy | None:
        """What the run has said that its restart depends on."""
        said = [word for word in self._messages if word.kind == "run"]
        return RestartPolicy.from_json(said[-1].text) if said else None

    def add_late(self, late: tuple[int, str] | None) -> None:
        """What the launcher says of a rank that cannot: it is what the others end by."""
        if late is not None:
            with self._lock:
                self._messages.append(RankMessage(late[0], "late", late[1]))

    def clear(self) -> None:
        """What has been said is of ranks that are no more."""
        self.read()
        self._messages = []

    def close(self) -> None:
        os.close(self._file)


def parse_message(said: object) -> RankMessage:
    """Raises ValueError for what is no word."""
    if not isinstance(said, dict) or set(said) != {"rank", "kind", "text"}:
        raise ValueError("not the fields of a word")
    rank, kind, text = said["rank"], said["kind"], said["text"]
    if type(rank) is not int or rank < 0 or kind not in _KINDS or not isinstance(text, str):
        raise ValueError("not the values of a word")
    if kind == "run":
        RestartPolicy.from_json(text)
    return RankMessage(rank, kind, text)


def determine_outcome(
    codes: Mapping[int, int],
    words: Sequence[RankMessage],
    asked: int = 0,
    roles: Mapping[int, str] = MappingProxyType({}),
) -> RunOutcome:
    """What the ends of ranks come to.

    codes: how they ended, by rank, negative by a signal; without those that the launcher has killed. asked: the signal
    by which all were to end. roles: of ranks that are to be told apart, in words: what they do, or where they are.
    """
    if codes and all(code in (0, REQUEUE_EXIT_CODE) for code in codes.values()):
        stopped = [word for word in words if word.kind == "stopped"]
        if stopped:
            return RunOutcome(REQUEUE_EXIT_CODE, stopped[0].text, "stopped")
        return RunOutcome(max(codes.values()), "", "stopped" if REQUEUE_EXIT_CODE in codes.values() else "done")
    if asked == signal.SIGINT:
        return RunOutcome(128 + asked, f"ended by {signal_name(asked)}", "asked")
    late = [word for word in words if word.kind == "late"][-1:]
    words = [word for word in words if word.kind not in ("run", "late")]
    spoke = {word.rank for word in (*words, *late) if word.text}
    killed = {rank: -code for rank, code in codes.items() if code < 0 and rank not in spoke and -code != asked}
    for rank, number in killed.items():
        if number != signal.SIGABRT:  # by which libraries end, too, when a peer is lost
            return _killed_outcome(rank, number, roles)
    for kind, status in (("mistake", 2), ("fault", 1)):
        for word in words:
            if word.kind == kind:
                return RunOutcome(status, word.text, kind, word.rank)  # type: ignore[arg-type]
    if asked:
        return RunOutcome(128 + asked, f"ended by {signal_name(asked)}", "asked")
    if late and late[0].text:
        return RunOutcome(1, late[0].text, "late", late[0].rank)
    for rank, number in killed.items():
        return _killed_outcome(rank, number, roles)
    for rank, code in codes.items():
        if code > 0 and rank not in spoke:
            return RunOutcome(
                code, f"error: {_describe_rank(rank, roles)} ended with status {code} and said nothing", "fault", rank
            )
    for word in words:
        if word.kind == "lost":
            return RunOutcome(1, word.text, "lost")
        if word.kind == "ended":  # not by us
            text = f"error: {_describe_rank(word.rank, roles)} was {word.text}"
            return RunOutcome(codes.get(word.rank, 1), text, "killed", word.rank)
    return RunOutcome(1, "error: the ranks did not end in time and were killed", "lost")


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
    """`command` as `world` ranks, once. saves: whether a first SIGTERM is answered by saving, at its leisure. pending:
    where signals are noted, see `noted`. roles: see `verdict`."""

    def __init__(
        self,
        command: Sequence[str],
        world: int,
        saves: bool,
        grace: float = GRACE_S,
        roles: Mapping[int, str] = MappingProxyType({}),
        pending: list[int] | None = None,
    ) -> None:
        self.command, self.world, self.saves, self.grace, self.roles = command, world, saves, grace, roles
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.pending: list[int] = [] if pending is None else pending  # signals that have come
        self.stop_signal = 0
        self.deadline = float("inf")
        self.failed_at = float("inf")
        self._last_signal_times: dict[int, float] = {}
        self._is_asked_twice = False  # they have been asked twice
        self._stopped_monitor = StoppedRankMonitor()

    def run(self, environment: Mapping[str, str]) -> tuple[RunOutcome, RestartPolicy | None]:
        """Until all ranks have ended. Returns what that comes to, and what the run has said of itself."""
        words = RankMessages()
        killed: set[int] = set()
        try:
            self._start({**environment, **words.environment})
            while any(rank.poll() is None for rank in self.ranks):
                self._poll()
                words.read()
                words.add_late(self._stopped_monitor.poll(self._running_pids, words.restart_policy()))
                if time.monotonic() > self.deadline:
                    killed |= self._signal_all(signal.SIGKILL)
                time.sleep(_POLL_S)
            self._poll()  # what came to all at once
            codes = {n: rank.returncode for n, rank in enumerate(self.ranks) if n not in killed}
            return determine_outcome(codes, words.read(), self.stop_signal, self.roles), words.restart_policy()
        finally:
            self._signal_all(signal.SIGKILL)
            for rank in self.ranks:
                rank.wait()
            words.close()

    def _start(self, environment: Mapping[str, str]) -> None:
        # They take these from their first line on, as they are blocked until then; see `ending.catch_signals`.
        with block_signals(_FORWARDED_SIGNALS):
            for rank in range(self.world):
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
                own = {name: str(number) for name, number in numbers.items()}
                self.ranks.append(subprocess.Popen(self.command, env={**os.environ, **environment, **own}))

    def _poll(self) -> None:
        """Pass on what has been asked for; end all when one has failed."""
        while self.pending:
            number = self.pending.pop(0)
            if number == signal.SIGUSR1:
                self._signal_all(number)
                continue
            if time.monotonic() - self._last_signal_times.get(number, 0.0) < SIGNAL_DEBOUNCE_S:
                continue  # sent twice, as by `timeout`
            self._last_signal_times[number] = time.monotonic()
            if self.stop_signal and self.deadline < float("inf"):
                self.deadline = 0.0  # they have been told before
            elif number == signal.SIGINT or not self.saves or self._is_asked_twice:
                self._end()
            else:
                self._signal_all(number)  # by a second one ranks end, but for those that are writing a checkpoint
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
        """To all that are there; which ranks these are."""
        there = {n: rank for n, rank in enumerate(self.ranks) if rank.poll() is None}
        for rank in there.values():
            rank.send_signal(number)
        return set(there)


def run_with_restarts(
    attempt: Callable[[Mapping[str, str]], tuple[RunOutcome, RestartPolicy | None]], pending: list[int]
) -> int:
    """Start a run, and again where `restarts.py` says so; its exit status, of which a line on stderr says why it is not
    0. attempt: starts all ranks with these variables, and returns when they have ended. pending: see `noted`.

    When it ends or starts again, none of its processes are left, however far down, nor what the kernel keeps for them.
    For that this process is to be one that inherits orphans (`processes/children.py`).
    """
    restarts, others = RestartTracker(), list_children()
    while True:
        end, rules = attempt({RESTART_COUNT_ENV: str(restarts.attempts)})
        end_orphans(others, ORPHAN_TIMEOUT_S)
        after = restarts.decide(end, rules)
        if after.text:
            print(after.text, file=sys.stderr, flush=True)
        if not after.should_restart:
            return after.status
        append_to_log(rules, after.text.splitlines()[-1])
        until = time.monotonic() + after.wait_s
        while time.monotonic() < until:
            time.sleep(_POLL_S)
            for number in pending:
                if number != signal.SIGUSR1:
                    print(f"ended by {signal_name(number)}", file=sys.stderr, flush=True)
                    return 128 + number


@contextlib.contextmanager
def block_signals(numbers: Sequence[int]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def record_signals(pending: list[int]) -> Iterator[None]:
    """Within the block signals are noted in the list, and do nothing else."""

    def note(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    before = {number: signal.getsignal(number) for number in _FORWARDED_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
