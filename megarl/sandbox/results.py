"""Limits of a box, and the results that come out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Reason = Literal["", "exit", "signal", "time", "memory", "output", "processes", "closed"]
"""Why a run is not ok: a nonzero exit status (`exit`); a signal, its own or RLIMIT_CPU's (`signal`); or an exceeded
limit: wall-clock time, memory of all processes and files, output, or, on kernels before 5.14, the number of processes
(later kernels refuse the fork instead). `closed`: the session was closed or its interpreter has exited."""


@dataclass(frozen=True)
class Limits:
    """Limits of one box. Exceeding one ends the box with every process in it."""

    seconds: float = 10.0
    """Wall-clock seconds from the start of the box; in a session, of each call. Rounded up, also bounds the CPU seconds
    of one process."""
    memory_mb: int = 0
    """MiB of all processes and files of the box together; 0 for `sandbox.memory_mb`. The address space of each process
    is limited to four times as much, at least 4 GiB (threads and BLAS map much that they never touch)."""
    disk_mb: int = 64
    """MiB of all files in the box, which count as memory, too; beyond it, writes fail with "no space left"."""
    files: int = 4096
    """Number of files and folders."""
    processes: int = 32
    """Number of processes and threads."""
    open_files: int = 128
    """Open files per process."""
    output_bytes: int = 1 << 20
    """Bytes of stdout, of stderr, and of results on the private channel, each; fetched files may have 16 times as much
    in total. A session's output is truncated, keeping head and tail; any other run ends at the limit."""


@dataclass(frozen=True)
class Result:
    """Outcome of one run."""

    ok: bool
    """Exit status 0 within all limits. Not a verdict: any program can exit with 0."""
    status: int | None
    """Exit status, or minus the signal that ended it; None if the sandbox was terminated from outside."""
    stdout: bytes
    stderr: bytes
    seconds: float
    reason: Reason = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Requested files that are regular, without symbolic links, hard links, or holes."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Requested files that exist but were not fetched: the reason, as words that follow the name."""


@dataclass(frozen=True)
class HarnessResult:
    """Results that a harness sent on its private channel."""

    results: Mapping[int, Any]
    """Plain JSON values by number, from 0 to count - 1. Omits numbers that came twice, lines without the nonce, and
    lines that do not parse. NaN is as Python's JSON reads it: compare with care."""
    count: int
    run: Result

    @property
    def is_complete(self) -> bool:
        """Whether every result has arrived, correct or not."""
        return len(self.results) == self.count


@dataclass(frozen=True)
class Output:
    """Outcome of one call of an interpreter."""

    ok: bool
    """Finished without an exception, within all limits."""
    stdout: str
    """Includes the value of the last expression, as an interactive interpreter prints it. Truncated at
    `Limits.output_bytes`, keeping head and tail."""
    stderr: str
    """Includes the traceback of an exception."""
    seconds: float
    reason: Reason = ""
    """`exit` if the code raised an exception or exited the interpreter."""
    is_state_lost: bool = False
    """Whether the session ended and lost its state; the next call starts a new one."""


@dataclass(frozen=True)
class Probe:
    """Isolation of this machine's boxes."""

    backend: str
    layers: tuple[str, ...]
    """Layers that hold, described in words."""
    missing: tuple[str, ...] = ()
    """Optional layers that are missing, with their substitutes; for backend `none` a warning."""

    def __str__(self) -> str:
        layers = ", ".join(self.layers) or "no protection"
        return f"sandbox {self.backend}: {layers}" + "".join(f"; {text}" for text in self.missing)
