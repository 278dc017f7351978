"""Hooks for waits on other ranks, row transfers, and the progress of long work, such as a timeline or a display."""

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
"""(name, kind: `wait` or `data`) -> context manager that is entered for the duration."""

_wait_listener: WaitListener | None = None  # of all threads
_nesting = threading.local()


def set_wait_listener(listener: WaitListener | None) -> None:
    global _wait_listener
    _wait_listener = listener


def traced(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that waits or transfers rows. Of nested calls only the outermost is reported."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if _wait_listener is None or getattr(_nesting, "is_reported", False):
                return function(*args, **kwargs)
            _nesting.is_reported = True
            try:
                with _wait_listener(function.__name__, what):
                    return function(*args, **kwargs)
            finally:
                _nesting.is_reported = False

        return call

    return wrap


_progress_listener: Callable[[int, int], None] | None = None


def set_progress_listener(listener: Callable[[int, int], None] | None) -> None:
    global _progress_listener
    _progress_listener = listener


def track_progress(items: Iterable[Item], total: int) -> Iterator[Item]:
    """Iterate over the items and report how many of `total` have been consumed in the current phase."""
    for number, item in enumerate(items):
        if _progress_listener is not None:
            _progress_listener(number, total)
        yield item
