"""A generation that no step waits for: it goes on while models are trained, and through the pushes of their weights."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager

from megarl.config import ConfigError
from megarl.rollout.gathering import Gathered
from megarl.rollout.queue import Tickets
from megarl.types import Everyone, Rollout, Rollouts


class Generation:
    """Of all ranks together; those that lead no engine have no `mine`. begun: by which version of the weights.
    now: the version that the engines have. waiting: what is on while some ranks wait for theirs."""

    def __init__(
        self,
        mine: Future[Gathered] | None,
        tickets: Tickets,
        everyone: Everyone,
        *,
        begun: int,
        now: Callable[[], int],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._mine, self._tickets, self._everyone, self._now, self._waiting = mine, tickets, everyone, now, waiting
        self.begun = begun

    def is_over(self) -> bool:
        """Whether nobody has anything under way. Collective."""
        return all(self._everyone.objects(self._mine is None or self._mine.done()))

    def result(self) -> Rollouts:
        """What has come of it, when all of it is over; call it once. Raises ConfigError on all ranks where it failed,
        or an engine was lost with answers that no other has generated. Collective."""
        mine: list[Rollout] = []
        error = ""
        with self._waiting():
            try:
                mine = [] if self._mine is None else self._mine.result().rollouts
            except RuntimeError as failure:
                error = str(failure)
            errors = [text for text in self._everyone.objects(error) if text]
        if errors:
            raise ConfigError(errors[0])
        if left := max(self._everyone.objects(0 if self._mine is None else self._tickets.left())):
            raise ConfigError(f"an engine was lost, and with it the answers to {left} prompts")
        return Rollouts.of(mine, [one.group for one in mine], self._everyone, self._now())


def newest_version(rollouts: Rollouts) -> int:
    """Of the weights that chose any of their tokens; -1 where none did. Collective."""
    mine = max((version for one in rollouts.here for version, _ in one.runs), default=-1)
    return max(rollouts.everyone.objects(mine))
