"""Several ranks as threads of this process, for what is said of all of them together: `types.Everyone`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Thread:
    """One rank of `world`, which all meet in every call."""

    def __init__(self, rank: int, meet: Callable[[int, Any], list[Any]]) -> None:
        self.rank, self._meet = rank, meet

    def total(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meet(self.rank, mine)).sum(0).to(mine.dtype)

    def rows(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meet(self.rank, mine))

    def objects(self, mine: Any) -> list[Any]:
        return self._meet(self.rank, mine)


def as_ranks(world: int, work: Callable[[Thread], T]) -> list[T]:
    """What `work` returns on each of so many ranks, which run at the same time."""
    barrier, table, results, errors = threading.Barrier(world), [None] * world, [None] * world, []

    def meet(rank: int, value: Any) -> list[Any]:
        table[rank] = value
        barrier.wait(30)
        everyone = list(table)
        barrier.wait(30)
        return everyone

    def run(rank: int) -> None:
        try:
            results[rank] = work(Thread(rank, meet))  # type: ignore[call-overload]
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results  # type: ignore[return-value]
