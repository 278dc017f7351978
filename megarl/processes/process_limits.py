"""Limits of a process that runs user code: a minimal environment and bounded memory."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def clean_environment(pass_env: Sequence[str] = (), source: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a worker process, taken from `source`, by default this process's environment."""
    source = os.environ if source is None else source
    names = [name for name in source if name in INHERITED_VARIABLES or name in pass_env or name.startswith("LC_")]
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


def _lower(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
