"""Ranks as threads of this process, for tests of sharded data: an implementation of `types.Comm`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class ThreadRank:
    """One rank. All ranks must make the same calls."""

    def __init__(self, rank: int, exchange: Callable[[int, Any], list[Any]]) -> None:
        self.rank, self._exchange = rank, exchange
        self.largest = 0  # most bytes in one `all_reduce`

    def all_reduce(self, local: torch.Tensor) -> torch.Tensor:
        """Sum in rank order, as `parallel.row_exchange` does, so that all ranks get the same bits."""
        self.largest = max(self.largest, local.nbytes)
        parts = self._exchange(self.rank, local)
        assert {(part.shape, part.dtype) for part in parts} == {(local.shape, local.dtype)}
        result = parts[0].clone()
        for part in parts[1:]:
            result += part
        return result

    def all_gather_rows(self, local: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(self.rank, local)
        assert {(part.shape[1:], part.dtype) for part in parts} == {(local.shape[1:], local.dtype)}
        return torch.cat(parts)

    def all_gather_objects(self, local: Any) -> list[Any]:
        return self._exchange(self.rank, local)


def as_ranks(world: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """Run `work` on `world` concurrent ranks; return their results in rank order."""
    barrier, table, results, errors = threading.Barrier(world), [None] * world, [None] * world, []

    def exchange(rank: int, value: Any) -> list[Any]:
        table[rank] = value
        barrier.wait(30)
        values = list(table)
        barrier.wait(30)
        return values

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRank(rank, exchange))  # type: ignore[call-overload]
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
