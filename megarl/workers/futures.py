"""Results of roles that may live on other ranks: futures of model outputs, and metrics of updates.

All ranks run the same controller, so all wait and synchronise in the same order. Only `Future.wait`,
`UpdateMetrics.sync` and `sync_metrics` communicate; printing or inspecting an object on one rank is always safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megarl.parallel import ranks

T = TypeVar("T")


class Future(Generic[T]):
    """The result of a role's call, which has already begun. `wait` returns the value on every rank."""

    def __init__(self, receive: Callable[[], T]) -> None:
        self._receive: Callable[[], T] | None = receive
        self._value: T | None = None

    @classmethod
    def completed(cls, value: T) -> Future[T]:
        """Return a future whose value is already available."""
        future = cls(lambda: value)
        future.wait()
        return future

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns without communication."""
        return self._receive is None

    def wait(self) -> T:
        """Return the value. The first call receives it from the role's ranks, so all ranks must call it together."""
        if self._receive is not None:
            self._value, self._receive = self._receive(), None
        return self._value  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"<Future {'done' if self.is_done else 'pending: call wait() on all ranks'}>"


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of one optimizer step. `sync` creates them known to all ranks."""

    local: Mapping[str, float] | None
    """Metrics on this rank; None if the role's model is elsewhere."""
    source: int | None = None
    """Rank that broadcasts the metrics; None if all ranks already have them."""

    def sync(self) -> dict[str, float]:
        """Return the metrics on every rank. Collective where the role is on separate ranks."""
        return sync_metrics([self])[0]


def sync_metrics(updates: Sequence[UpdateMetrics]) -> list[dict[str, float]]:
    """Return the metrics of several updates on every rank, in their order. Collective: one broadcast per source."""
    synced = [dict(update.local or {}) for update in updates]
    for source in dict.fromkeys(update.source for update in updates if update.source is not None):
        indices = [index for index, update in enumerate(updates) if update.source == source]
        received = ranks.broadcast_object([updates[index].local for index in indices], source)
        for index, metrics in zip(indices, received, strict=True):
            synced[index] = dict(metrics or {})
    return synced
