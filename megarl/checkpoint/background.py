"""A thread of a rank that writes its part of a checkpoint while the rank trains. It talks to no other rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from megarl.checkpoint.manifest import Entry

NICENESS = 10
"""By which the thread stands back where cores are scarce: training waits for its ranks, and nobody for a checkpoint."""
LEAVING_S = 30.0
"""How long a run that ends waits for the thread to leave its work."""

Work = Callable[[Callable[[], bool]], Mapping[Path, Entry]]
"""Given a function that says whether to leave it; returns the files that it wrote."""


class Writing:
    """One piece of work, begun. A daemon: a run that dies does not wait for it."""

    def __init__(self, work: Work) -> None:
        self._work, self._leave = work, threading.Event()
        self._written: Mapping[Path, Entry] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + NICENESS))
        try:
            self._written = self._work(self._leave.is_set)
        except BaseException as error:  # noqa: B036  whatever it is, `result` says it
            self._error = error

    def over(self) -> bool:
        """Whether it has been done, or has failed."""
        return not self._thread.is_alive()

    def result(self) -> Mapping[Path, Entry]:
        """What was written, once it is. Raises OSError where it could not be."""
        self._thread.join()
        if self._written is not None:
            return self._written
        error = self._error
        raise error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")

    def leave(self) -> None:
        """Stop at the next occasion, and wait for that."""
        self._leave.set()
        self._thread.join(LEAVING_S)
