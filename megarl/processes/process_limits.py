"""Limits of a process that runs user code: a minimal environment and bounded memory."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INHERITED_VARIABLES = (
    *("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"),
    *("PYTHONHASHSEED", "MEGARL_SANDBOX"),
)
"""Variables that are inherited, in addition to all that begin with LC_. None of them is a secret."""


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a worker process.

    pass_env: further variables to inherit if set. memory_mb: MiB of data that a process may have; 0 for no limit.
    """

    pass_env: tuple[str, ...] = ()
    memory_mb: int = 0


NO_LIMITS = ProcessLimits()


def clean_environment(passed: Sequence[str] = (), of: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a worker process. of: the environment to take it from, by default this process's."""
    source = os.environ if of is None else of
    names = [name for name in source if name in INHERITED_VARIABLES or name in passed or name.startswith("LC_")]
    path = os.pathsep.join(filter(None, sys.path))
    # One thread each, because there are about as many processes as cores; inherited variables override these.
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | {name: source[name] for name in names}


def apply_limits(memory_mb: int) -> None:
    """Limit memory and disable core dumps, for this process and separately for each that it starts.

    Also makes the kernel's OOM killer prefer such a process over a rank.
    """
    _lower(resource.RLIMIT_CORE, 0)
    if memory_mb:
        _lower(resource.RLIMIT_DATA, memory_mb << 20)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def _lower(what: Any, to: int) -> None:
    hard = resource.getrlimit(what)[1]
    to = to if hard == resource.RLIM_INFINITY else min(to, hard)
    resource.setrlimit(what, (to, to))
