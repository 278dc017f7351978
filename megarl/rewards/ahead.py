"""Rewards that are begun as soon as a conversation has ended, and found again when they are asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from megarl.types import Rollout, Turn


class _Begun(Protocol):
    def done(self) -> bool: ...


Begun = TypeVar("Begun", bound=_Begun)


class Ahead(Generic[Begun]):
    """begin: what is to be begun, from the thread in which conversations end.

    A conversation is known again by its last turn, which nobody else has: later it may be of another group, or step.
    """

    def __init__(self, begin: Callable[[Rollout], Begun]) -> None:
        self._begin = begin
        self._begun: dict[int, tuple[weakref.ref[Turn], Begun]] = {}

    def ended(self, rollout: Rollout) -> None:
        """Is told of a conversation that has ended."""
        turn, begun = rollout.turns[-1], self._begun
        number = id(turn)
        # Nobody asks for one that is dropped.
        begun[number] = weakref.ref(turn, lambda _: begun.pop(number, None)), self._begin(rollout)

    def take(self, rollout: Rollout) -> tuple[Begun, bool]:
        """What is said of a rollout, begun now where it was not; and whether it was there already."""
        turn = rollout.turns[-1]
        known = self._begun.pop(id(turn), None)
        if known is None or known[0]() is not turn:
            return self._begin(rollout), False
        return known[1], known[1].done()
