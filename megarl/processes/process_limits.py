"""What a process of somebody else's code is given of the rank's: of its environment little, of memory so much."""

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
"""Variables that are handed on, with all that begin with LC_; none of them is a secret."""


@dataclass(frozen=True)
class ProcessLimits:
    """pass_env: further variables that are handed on where they are set. memory_mb: MiB of data that a process may
    have, 0 for as much as there is."""

    pass_env: tuple[str, ...] = ()
    memory_mb: int = 0


NO_LIMITS = ProcessLimits()


def clean_environment(passed: Sequence[str] = (), of: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of such a process. of: the one that it is made of, this process's by default."""
    found = os.environ if of is None else of
    names = [name for name in found if name in INHERITED_VARIABLES or name in passed or name.startswith("LC_")]
    path = os.pathsep.join(filter(None, sys.path))
    # There is a process for each core, or as many; a name that is passed on comes last.
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | {name: found[name] for name in names}


def apply_limits(memory_mb: int) -> None:
    """Bound this process and all that it starts, each by itself: memory, and no core files. Where memory is short, the
    kernel is to take such a process and no rank."""
    _lower(resource.RLIMIT_CORE, 0)
    if memory_mb:
        _lower(resource.RLIMIT_DATA, memory_mb << 20)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def _lower(what: Any, to: int) -> None:
    hard = resource.getrlimit(what)[1]
    to = to if hard == resource.RLIM_INFINITY else min(to, hard)
    resource.setrlimit(what, (to, to))
