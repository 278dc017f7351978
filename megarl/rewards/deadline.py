"""A limit on how long one call of a reward function may take, in the main thread and without a process of its own.

Functions may use `signal.alarm` themselves, which works in the main thread only. So they run there, and a thread beside
it sends this process a signal that nobody else uses when time is up; its handler raises. Where that does not help, in
C code that never comes back or in a function that catches everything, the thread says so and ends the process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

LATE = signal.SIGRTMIN + 7
GRACE_S = 10.0
"""How long a function has to come back once it is told."""
_AGAIN_S = 1.0
_LOOK_S = 0.1


class TookTooLong(BaseException):
    """Time is up. Not an Exception, which functions catch."""


class Deadline:
    """Within a `with` block of it, what happens between `begin` and `end` may take so many seconds.

    TookTooLong is raised out of what takes longer. For the main thread: in others nothing can be interrupted, and only
    the last resort is left.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._call: tuple[str, float] | None = None  # what is going on, and when it must be over
        self._raised = False
        self._closed = threading.Event()
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Deadline:
        if self._main:
            self._before = signal.signal(LATE, self._raise)
        self._watching = threading.Thread(target=self._watch, name="reward deadline", daemon=True)
        self._watching.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call = None
        self._closed.set()
        self._watching.join()
        if self._main:
            signal.signal(LATE, self._before)

    def begin(self, what: str) -> None:
        """what: names the call in the last line."""
        self._raised = False
        self._call = what, time.monotonic() + self.seconds

    def end(self) -> None:
        """Raises TookTooLong where the function has swallowed that."""
        self._call = None
        if self._raised:
            raise TookTooLong

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._call is not None:
            self._raised = True
            raise TookTooLong

    def _watch(self) -> None:
        told = 0.0
        while not self._closed.wait(_LOOK_S):
            call, now = self._call, time.monotonic()
            if call is None or now < call[1]:
                told = 0.0
            elif now > call[1] + GRACE_S:
                _give_up(f"error: {call[0]} took longer than reward.timeout={self.seconds:g} s, and does not stop")
            elif self._main and now - told >= _AGAIN_S:
                told = now
                signal.pthread_kill(threading.main_thread().ident or 0, LATE)


def _give_up(line: str) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode(errors="replace") + b"\n")
    os._exit(2)
