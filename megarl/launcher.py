"""A run's ranks as processes of this machine: they start together, and when one fails, the others end with it.

Ranks tell their launcher why they end (`ending.tell`), over a socket that has a name and no file. What a run ends with
is what its first cause is, said in one line: not what the other ranks see of it, which is that a peer is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType

from megarl.ending import LAUNCHER, REQUEUE_EXIT_CODE, SAME_S, Kind, name_of

GRACE_S = 10.0
"""How long ranks that shall end now may take, to close their engines and files, before they are killed."""
NOTICE_S = 3.0
"""How long the others have to see by themselves that one has failed, and to write down where they were."""
_LOOK_S = 0.05
_TO_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_WHY = {
    "SIGKILL": " (the kernel does that when memory is short)",
    "SIGBUS": " (for example where /dev/shm is full)",
    "SIGABRT": " (by a library that gave up; its last lines are above)",
}


@dataclass(frozen=True)
class Word:
    """What a rank said at its end."""

    rank: int
    kind: Kind
    text: str


class Words:
    """Where ranks say why they end. `environment` tells them where that is."""

    def __init__(self) -> None:
        name = f"megarl-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{name}")
        self._socket.setblocking(False)
        self.environment = {LAUNCHER: f"{os.getpid()}:{name}"}
        self._said: list[Word] = []

    def read(self) -> list[Word]:
        """All that has been said."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._said.append(Word(**json.loads(self._socket.recv(2**16))))
        return self._said

    def fileno(self) -> int:
        """Can be read from when somebody has said something."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def verdict(
    codes: Mapping[int, int], words: Sequence[Word], asked: int = 0, roles: Mapping[int, str] = MappingProxyType({})
) -> tuple[int, str]:
    """Exit status of the run, and the line that says why, empty where all is well.

    codes: how ranks ended, by rank, negative by a signal; without those that the launcher has killed. asked: the signal
    by which all were to end. roles: of ranks that have not all the same, in words.
    """
    if codes and all(code in (0, REQUEUE_EXIT_CODE) for code in codes.values()):
        stopped = [word for word in words if word.kind == "stopped"]
        return (REQUEUE_EXIT_CODE, stopped[0].text) if stopped else (max(codes.values()), "")
    if asked == signal.SIGINT:
        return 128 + asked, f"ended by {name_of(asked)}"
    spoke = {word.rank for word in words}
    killed = {rank: -code for rank, code in codes.items() if code < 0 and rank not in spoke and -code != asked}
    for rank, number in killed.items():
        if number != signal.SIGABRT:  # by which libraries end, too, when a peer is lost
            return 128 + number, _killed(rank, number, roles)
    for kind, status in (("mistake", 2), ("fault", 1)):
        for word in words:
            if word.kind == kind:
                return status, word.text
    if asked:
        return 128 + asked, f"ended by {name_of(asked)}"
    for rank, number in killed.items():
        return 128 + number, _killed(rank, number, roles)
    for rank, code in codes.items():
        if code > 0 and rank not in spoke:
            return code, f"error: {_who(rank, roles)} ended with status {code} and said nothing"
    for word in words:
        if word.kind == "lost":
            return 1, word.text
        if word.kind == "ended":  # not by us
            return codes.get(word.rank, 1), f"error: {_who(word.rank, roles)} was {word.text}"
    return 1, "error: the ranks did not end in time and were killed"


def _killed(rank: int, number: int, roles: Mapping[int, str]) -> str:
    name = name_of(number)
    return f"error: {_who(rank, roles)} was killed by {name}{_WHY.get(name, '')}"


def _who(rank: int, roles: Mapping[int, str]) -> str:
    return f"rank {rank} ({roles[rank]})" if rank in roles else f"rank {rank}"


class Launch:
    """One run of `command` as `world` ranks. saves: whether a first SIGTERM is answered by saving, at its leisure.
    roles: see `verdict`."""

    def __init__(
        self,
        command: Sequence[str],
        world: int,
        saves: bool,
        grace: float = GRACE_S,
        roles: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.command, self.world, self.saves, self.grace, self.roles = command, world, saves, grace, roles
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.pending: list[int] = []  # signals that have come
        self.asked = 0
        self.deadline = float("inf")
        self.failed_at = float("inf")
        self._since: dict[int, float] = {}
        self._again = False  # they have been asked twice

    def run(self, environment: Mapping[str, str]) -> int:
        """Until all ranks have ended. Returns the exit status of the run; a line on stderr says why it is not 0."""
        words = Words()
        killed: set[int] = set()
        try:
            self._start({**environment, **words.environment})
            while any(rank.poll() is None for rank in self.ranks):
                self._look()
                words.read()
                if time.monotonic() > self.deadline:
                    killed |= self._send(signal.SIGKILL)
                time.sleep(_LOOK_S)
            self._look()  # what came to all at once
            codes = {n: rank.returncode for n, rank in enumerate(self.ranks) if n not in killed}
            status, text = verdict(codes, words.read(), self.asked, self.roles)
        finally:
            self._send(signal.SIGKILL)
            for rank in self.ranks:
                rank.wait()
            words.close()
        if text:
            print(text, file=sys.stderr, flush=True)
        return status

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

    def _send(self, number: int) -> set[int]:
        """To all that are there; which ranks these are."""
        there = {n: rank for n, rank in enumerate(self.ranks) if rank.poll() is None}
        for rank in there.values():
            rank.send_signal(number)
        return set(there)


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
