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

from megarl.launch.exit_status import LAUNCHER, REQUEUE_EXIT_CODE, RESTARTED, SAME_S, Kind, Verdict, name_of
from megarl.launch.restarts import Restarts, Rules, note
from megarl.processes import memory_files
from megarl.processes.children import children, end_orphans, is_stopped

FURTHER_S = 15.0
"""How long behind `run.timeout_s`: where others notice they know more."""
_STOPPED_LOOK_S = 1.0
_AWAY_S = 10.0
"""Between two looks: the launcher was stopped itself, as by Ctrl-Z or `scontrol suspend`, and its ranks with it."""


class Stopped:
    """How long each rank of one launcher has been stopped."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._looked = 0.0
        self._over = False

    def look(self, ranks: Callable[[], Mapping[int, int]], rules: Rules | None) -> tuple[int, str] | None:
        """Kill a rank that has been stopped for too long, after which the launcher ends the others; which one, and
        what is to be said of it. ranks: the pids of those that are there, by rank. To be called again and again; most
        times it does nothing."""
        now = time.monotonic()
        if rules is None or self._over or now - self._looked < _STOPPED_LOOK_S:
            return None
        if now - self._looked > _AWAY_S:
            self._since.clear()
        self._looked = now
        for rank, pid in ranks().items():
            if not is_stopped(pid):
                self._since.pop(pid, None)
                continue
            seconds = now - self._since.setdefault(pid, now)
            if seconds > rules.timeout_s + FURTHER_S:
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
ORPHANS_S = 20.0
"""How long what ranks have left behind may take to end, before it is killed: engines that are on their way out."""
_LOOK_S = 0.05
_TO_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_WHY = {
    "SIGKILL": " (the kernel does that when memory is short)",
    "SIGBUS": " (for example where /dev/shm is full)",
    "SIGABRT": " (by a library that gave up; its last lines are above)",
}


_OWN_DOING = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
"""Signals that a program brings upon itself."""


@dataclass(frozen=True)
class Word:
    """What a rank said at its end; of kind `run`, what it said at its beginning (`ending.introduce`); of kind `late`,
    what was said of it by another; without a text, that this is over."""

    rank: int
    kind: Kind | Literal["run", "late"]
    text: str


_KINDS = (*get_args(Kind), "run", "late")


class Words:
    """Where ranks say why they end. `environment` tells them where that is.

    Ranks append lines of JSON to a memory file of this process, which they open through /proc. The kernel lets only
    processes of this user do that, so that no other user can say something or fill it up. What is no `Word` is dropped
    and counted.
    """

    def __init__(self) -> None:
        self._file = memory_files.create("megarl-words")
        self.environment = {LAUNCHER: f"{os.getpid()}:{memory_files.path(self._file)}"}
        self._said: list[Word] = []
        self._rest = b""  # of a line whose end has not been written yet
        self._at = 0
        self._reads = threading.Lock()
        self.dropped = 0
        """Lines that were no word."""

    def read(self) -> list[Word]:
        """All that has been said; in any thread."""
        with self._reads:
            while more := os.pread(self._file, 1 << 16, self._at):
                self._at += len(more)
                *lines, self._rest = (self._rest + more).split(b"\n")
                for line in filter(None, lines):
                    self._take(line)
        return self._said

    def _take(self, line: bytes) -> None:
        try:
            self._said.append(word_of(json.loads(line)))
        except (ValueError, RecursionError):
            self.dropped += 1
            if self.dropped == 1:
                text = f"warning: dropped {line[:80]!r}, which is no message of a rank to its launcher"
                print(text, file=sys.stderr, flush=True)

    def rules(self) -> Rules | None:
        """What the run has said that its restart depends on."""
        said = [word for word in self._said if word.kind == "run"]
        return Rules.of(said[-1].text) if said else None

    def add(self, late: tuple[int, str] | None) -> None:
        """What the launcher says of a rank that cannot: it is what the others end by."""
        if late is not None:
            with self._reads:
                self._said.append(Word(late[0], "late", late[1]))

    def forget(self) -> None:
        """What has been said is of ranks that are no more."""
        self.read()
        self._said = []

    def close(self) -> None:
        os.close(self._file)


def word_of(said: object) -> Word:
    """Raises ValueError for what is no word."""
    if not isinstance(said, dict) or set(said) != {"rank", "kind", "text"}:
        raise ValueError("not the fields of a word")
    rank, kind, text = said["rank"], said["kind"], said["text"]
    if type(rank) is not int or rank < 0 or kind not in _KINDS or not isinstance(text, str):
        raise ValueError("not the values of a word")
    if kind == "run":
        Rules.of(text)
    return Word(rank, kind, text)


def verdict(
    codes: Mapping[int, int], words: Sequence[Word], asked: int = 0, roles: Mapping[int, str] = MappingProxyType({})
) -> Verdict:
    """What the ends of ranks come to.

    codes: how they ended, by rank, negative by a signal; without those that the launcher has killed. asked: the signal
    by which all were to end. roles: of ranks that are to be told apart, in words: what they do, or where they are.
    """
    if codes and all(code in (0, REQUEUE_EXIT_CODE) for code in codes.values()):
        stopped = [word for word in words if word.kind == "stopped"]
        if stopped:
            return Verdict(REQUEUE_EXIT_CODE, stopped[0].text, "stopped")
        return Verdict(max(codes.values()), "", "stopped" if REQUEUE_EXIT_CODE in codes.values() else "done")
    if asked == signal.SIGINT:
        return Verdict(128 + asked, f"ended by {name_of(asked)}", "asked")
    late = [word for word in words if word.kind == "late"][-1:]
    words = [word for word in words if word.kind not in ("run", "late")]
    spoke = {word.rank for word in (*words, *late) if word.text}
    killed = {rank: -code for rank, code in codes.items() if code < 0 and rank not in spoke and -code != asked}
    for rank, number in killed.items():
        if number != signal.SIGABRT:  # by which libraries end, too, when a peer is lost
            return _killed(rank, number, roles)
    for kind, status in (("mistake", 2), ("fault", 1)):
        for word in words:
            if word.kind == kind:
                return Verdict(status, word.text, kind, word.rank)  # type: ignore[arg-type]
    if asked:
        return Verdict(128 + asked, f"ended by {name_of(asked)}", "asked")
    if late and late[0].text:
        return Verdict(1, late[0].text, "late", late[0].rank)
    for rank, number in killed.items():
        return _killed(rank, number, roles)
    for rank, code in codes.items():
        if code > 0 and rank not in spoke:
            return Verdict(code, f"error: {_who(rank, roles)} ended with status {code} and said nothing", "fault", rank)
    for word in words:
        if word.kind == "lost":
            return Verdict(1, word.text, "lost")
        if word.kind == "ended":  # not by us
            text = f"error: {_who(word.rank, roles)} was {word.text}"
            return Verdict(codes.get(word.rank, 1), text, "killed", word.rank)
    return Verdict(1, "error: the ranks did not end in time and were killed", "lost")


def _killed(rank: int, number: int, roles: Mapping[int, str]) -> Verdict:
    name = name_of(number)
    kind: Literal["fault", "killed"] = "fault" if name in _OWN_DOING else "killed"
    return Verdict(128 + number, f"error: {_who(rank, roles)} was killed by {name}{_WHY.get(name, '')}", kind, rank)


def _who(rank: int, roles: Mapping[int, str]) -> str:
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
        self.asked = 0
        self.deadline = float("inf")
        self.failed_at = float("inf")
        self._since: dict[int, float] = {}
        self._again = False  # they have been asked twice
        self._stopped = Stopped()

    def run(self, environment: Mapping[str, str]) -> tuple[Verdict, Rules | None]:
        """Until all ranks have ended. Returns what that comes to, and what the run has said of itself."""
        words = Words()
        killed: set[int] = set()
        try:
            self._start({**environment, **words.environment})
            while any(rank.poll() is None for rank in self.ranks):
                self._look()
                words.read()
                words.add(self._stopped.look(self._there, words.rules()))
                if time.monotonic() > self.deadline:
                    killed |= self._send(signal.SIGKILL)
                time.sleep(_LOOK_S)
            self._look()  # what came to all at once
            codes = {n: rank.returncode for n, rank in enumerate(self.ranks) if n not in killed}
            return verdict(codes, words.read(), self.asked, self.roles), words.rules()
        finally:
            self._send(signal.SIGKILL)
            for rank in self.ranks:
                rank.wait()
            words.close()

    def _start(self, environment: Mapping[str, str]) -> None:
        # They take these from their first line on, as they are blocked until then; see `ending.catch_signals`.
        with blocked(_TO_RANKS):
            for rank in range(self.world):
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
                own = {name: str(number) for name, number in numbers.items()}
                self.ranks.append(subprocess.Popen(self.command, env={**os.environ, **environment, **own}))

    def _look(self) -> None:
        """Pass on what has been asked for; end all when one has failed."""
        while self.pending:
            number = self.pending.pop(0)
            if number == signal.SIGUSR1:
                self._send(number)
                continue
            if time.monotonic() - self._since.get(number, 0.0) < SAME_S:
                continue  # sent twice, as by `timeout`
            self._since[number] = time.monotonic()
            if self.asked and self.deadline < float("inf"):
                self.deadline = 0.0  # they have been told before
            elif number == signal.SIGINT or not self.saves or self._again:
                self._end()
            else:
                self._send(number)  # by a second one ranks end, but for those that are writing a checkpoint
                self._again = self.asked != 0
            self.asked = self.asked if self.asked == signal.SIGINT else number
        failed = any(rank.poll() not in (None, 0, REQUEUE_EXIT_CODE) for rank in self.ranks)
        if failed:
            self.failed_at = min(self.failed_at, time.monotonic())
            if time.monotonic() - self.failed_at > NOTICE_S and self.deadline == float("inf"):
                self._end()

    def _end(self) -> None:
        self._send(signal.SIGINT)
        self.deadline = time.monotonic() + self.grace

    def _there(self) -> dict[int, int]:
        return {n: rank.pid for n, rank in enumerate(self.ranks) if rank.poll() is None}

    def _send(self, number: int) -> set[int]:
        """To all that are there; which ranks these are."""
        there = {n: rank for n, rank in enumerate(self.ranks) if rank.poll() is None}
        for rank in there.values():
            rank.send_signal(number)
        return set(there)


def until_it_ends(attempt: Callable[[Mapping[str, str]], tuple[Verdict, Rules | None]], pending: list[int]) -> int:
    """Start a run, and again where `restarts.py` says so; its exit status, of which a line on stderr says why it is not
    0. attempt: starts all ranks with these variables, and returns when they have ended. pending: see `noted`.

    When it ends or starts again, none of its processes are left, however far down, nor what the kernel keeps for them.
    For that this process is to be one that inherits orphans (`processes/children.py`).
    """
    restarts, others = Restarts(), children()
    while True:
        end, rules = attempt({RESTARTED: str(restarts.attempts)})
        end_orphans(others, ORPHANS_S)
        after = restarts.after(end, rules)
        if after.text:
            print(after.text, file=sys.stderr, flush=True)
        if not after.again:
            return after.status
        note(rules, after.text.splitlines()[-1])
        until = time.monotonic() + after.wait_s
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            for number in pending:
                if number != signal.SIGUSR1:
                    print(f"ended by {name_of(number)}", file=sys.stderr, flush=True)
                    return 128 + number


@contextlib.contextmanager
def blocked(numbers: Sequence[int]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def noted(pending: list[int]) -> Iterator[None]:
    """Within the block signals are noted in the list, and do nothing else."""

    def note(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    before = {number: signal.getsignal(number) for number in _TO_RANKS}
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
