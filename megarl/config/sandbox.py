"""Where code that the policy wrote is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megarl.strict import Range


@dataclass(frozen=True)
class SandboxConfig:
    """`sandbox/README.md` says what protects from what."""

    backend: str = "bubblewrap"
    """Boxes of this machine by bubblewrap, or the address of a service with SandboxFusion's API (`http://sandbox:8080`),
    or `none`: no protection at all, the program runs as the user who runs the training. A run whose reward or
    environments use the sandbox does not start where its layers cannot be had."""
    memory_mb: Annotated[int, Range(16, 1_048_576)] = 512
    """MiB that one box may use, all of its processes and files together; a caller may give it less or more."""
    processes: Annotated[int, Range(1, 4096)] = 16
    """Boxes that run at once on a machine, of all its ranks and reward processes; others wait for their turn. An
    interpreter counts only while a call runs."""
