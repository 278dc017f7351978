"""Results of a role that may live on other ranks: futures of what models say, and metrics of updates.

All ranks run the same controller, so all of them wait and synchronise in the same order. Nothing here communicates but
`Future.wait`, `UpdateMetrics.sync` and `sync_metrics`; printing or inspecting an object on one rank is always safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megarl.parallel import ranks

T = TypeVar("T")


class Future(Generic[T]):
    """The result of a role's call. The call has begun; `wait` returns its value, on every rank."""

    def __init__(self, receive: Callable[[], T]) -> None:
        self._receive: Callable[[], T] | None = receive
        self._value: T | None = None

    @classmethod
    def completed(cls, value: T) -> Future[T]:
        """Return a future whose value is here already."""
        future = cls(lambda: value)
        future.wait()
        return future

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns without communication."""
        return self._receive is None

    def wait(self) -> T:
        """Return the value; the first call receives it from the role's ranks. All ranks must call it alike."""
        if self._receive is not None:
            self._value, self._receive = self._receive(), None
        return self._value  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"<Future {'done' if self.is_done else 'pending: call wait() on all ranks'}>"


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of one optimizer step. `sync` makes them known to all ranks."""

    local: Mapping[str, float] | None
    """What this rank knows of them; None where the role's model is elsewhere."""
    source: int | None = None
    """The rank whose metrics all others get; None where every rank has the same ones already."""

    def sync(self) -> dict[str, float]:
        """Return the metrics on every rank. Collective where the role is on separate ranks."""
        return sync_metrics([self])[0]


def sync_metrics(updates: Sequence[UpdateMetrics]) -> list[dict[str, float]]:
    """Return the metrics of several updates on every rank, in their order. Collective: one broadcast for each source."""
    synced = [dict(update.local or {}) for update in updates]
    for source in dict.fromkeys(update.source for update in updates if update.source is not None):
        indices = [index for index, update in enumerate(updates) if update.source == source]
        received = ranks.broadcast_object([updates[index].local for index in indices], source)
        for index, metrics in zip(indices, received, strict=True):
            synced[index] = dict(metrics)
    return synced
