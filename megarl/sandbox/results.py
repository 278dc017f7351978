"""What a box may use, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Reason = Literal["", "exit", "signal", "time", "memory", "output", "processes", "closed"]
"""Why a run is not ok: its exit status was not 0; a signal ended it (its own doing, or RLIMIT_CPU's); or it went beyond
what it may: the seconds, the memory of all its processes and files, what it may print, and on
kernels before 5.14 how many processes it has (others refuse one too many). `closed`: a session that was
closed, or whose interpreter has ended."""


@dataclass(frozen=True)
class Limits:
    """Of one box. What goes beyond one of them ends the box, and with it every process in it."""

    seconds: float = 10.0
    """On the clock, from the start of the box; of a session: of each call. CPU seconds of one process are bounded by
    the same, rounded up."""
    memory_mb: int = 0
    """MiB of all processes and files of the box together; 0 for `sandbox.memory_mb`. No process has more address space
    than four times as much, at least 4 GiB (threads and BLAS map much that they never touch)."""
    disk_mb: int = 64
    """MiB of all files in the box, which are memory, too; beyond them it reads "no space left"."""
    files: int = 4096
    """Files and folders."""
    processes: int = 32
    """Processes and threads."""
    open_files: int = 128
    """Of each process."""
    output_bytes: int = 1 << 20
    """Of stdout, of stderr, and of the results on the private channel, each; and of the files that are fetched, all
    together, 16 times as much. A session's output is cut there, head and tail kept; another run ends there."""


@dataclass(frozen=True)
class Result:
    """Of one run."""

    ok: bool
    """Exit status 0 within all limits. Not a verdict: any program can exit with 0."""
    status: int | None
    """The exit status, minus the signal where one ended it; None where the box was ended from outside."""
    stdout: bytes
    stderr: bytes
    seconds: float
    reason: Reason = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Of those that were asked for, the regular files that there are: no links, none that has other names or holes."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Of those that were asked for, those that are there and were not fetched: why, as words that follow the name."""


@dataclass(frozen=True)
class HarnessResult:
    """What a harness sent on its private channel."""

    results: Mapping[int, Any]
    """By number, 0 to count - 1; plain values as JSON has them. A number that came twice, a line without the nonce and
    one that does not parse are not there. NaN is as Python's JSON reads it: compare with care."""
    count: int
    run: Result

    @property
    def is_complete(self) -> bool:
        """Whether each result has come. Says nothing of whether they are right: that is for the caller, who has the
        answers."""
        return len(self.results) == self.count


@dataclass(frozen=True)
class Output:
    """Of one call of an interpreter."""

    ok: bool
    """Ran to its end without an exception, within all limits."""
    stdout: str
    """With the value of the last expression, as an interactive interpreter shows it. Cut at `Limits.output_bytes`, head
    and tail kept."""
    stderr: str
    """With the traceback of an exception."""
    seconds: float
    reason: Reason = ""
    """`exit` where the code raised an exception, or has ended the interpreter itself."""
    is_state_lost: bool = False
    """The session's state is: it was ended, and the next call begins a new one."""


@dataclass(frozen=True)
class Probe:
    """What protects this machine's boxes."""

    backend: str
    layers: tuple[str, ...]
    """Those that hold, in words."""
    missing: tuple[str, ...] = ()
    """Those that can be done without, with what stands in for each; all of them where the backend is `none`."""

    def __str__(self) -> str:
        there = ", ".join(self.layers) or "no protection"
        return f"sandbox {self.backend}: {there}" + "".join(f"; {text}" for text in self.missing)
