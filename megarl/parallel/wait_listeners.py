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
Observer = Callable[[str, str], AbstractContextManager[None]]
"""(name, what: `wait` or `data`) -> entered meanwhile."""

_observer: Observer | None = None
_inside = threading.local()


def watch(observer: Observer | None) -> None:
    """From now on this one is told, of all threads."""
    global _observer
    _observer = observer


def watched(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that waits, or gives rows. Of one within another only the outer one is told of."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if _observer is None or getattr(_inside, "one", False):
                return function(*args, **kwargs)
            _inside.one = True
            try:
                with _observer(function.__name__, what):
                    return function(*args, **kwargs)
            finally:
                _inside.one = False

        return call

    return wrap


_teller: Callable[[int, int], None] | None = None


def tell_share(teller: Callable[[int, int], None] | None) -> None:
    """From now on this one is told how far work is."""
    global _teller
    _teller = teller


def share(done: int, total: int) -> None:
    """So much of the work of this phase is done; in units of its own, such as tensors. Costs nothing where nobody is
    told."""
    if _teller is not None:
        _teller(done, total)


def counted(items: Iterable[Item], total: int) -> Iterator[Item]:
    """These, one after another, and it is told how many there were of so many."""
    for number, item in enumerate(items):
        share(number, total)
        yield item
