"""Who is told when a rank waits for others, or gives them rows, and how far a long piece of work is: a timeline, a
display, or nobody."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Item = TypeVar("Item")
WaitListener = Callable[[str, str], AbstractContextManager[None]]
"""(name, what: `wait` or `data`) -> entered meanwhile."""

_wait_listener: WaitListener | None = None
_nesting = threading.local()


def set_wait_listener(observer: WaitListener | None) -> None:
    """From now on this one is told, of all threads."""
    global _wait_listener
    _wait_listener = observer


def traced(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that waits, or gives rows. Of one within another only the outer one is told of."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if _wait_listener is None or getattr(_nesting, "one", False):
                return function(*args, **kwargs)
            _nesting.one = True
            try:
                with _wait_listener(function.__name__, what):
                    return function(*args, **kwargs)
            finally:
                _nesting.one = False

        return call

    return wrap


_progress_listener: Callable[[int, int], None] | None = None


def set_progress_listener(teller: Callable[[int, int], None] | None) -> None:
    """From now on this one is told how far work is."""
    global _progress_listener
    _progress_listener = teller


def report_progress(done: int, total: int) -> None:
    """So much of the work of this phase is done; in units of its own, such as tensors. Costs nothing where nobody is
    told."""
    if _progress_listener is not None:
        _progress_listener(done, total)


def track_progress(items: Iterable[Item], total: int) -> Iterator[Item]:
    """These, one after another, and it is told how many there were of so many."""
    for number, item in enumerate(items):
        report_progress(number, total)
        yield item
