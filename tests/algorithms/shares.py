"""Ranks that each hold a share of a batch, as threads; and random batches to share out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megarl.types import Total


class Ranks:
    """`run` calls a function once per rank, with a `total` that adds up what all of them give to it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=60)
        self.given: list[Any] = [None] * count
        self.largest = 0  # bytes that went through `total` at once

    def total(self, rank: int) -> Total:
        def add_up(x: torch.Tensor) -> torch.Tensor:
            self.given[rank] = x
            self.barrier.wait()
            like = self.given[0]
            assert x.shape == like.shape and x.dtype == like.dtype
            result = torch.stack(self.given).sum(0, dtype=x.dtype)
            self.largest = max(self.largest, x.nbytes)
            self.barrier.wait()
            return result

        return add_up

    def run(self, work: Callable[[int, Total], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            try:
                return work(rank, self.total(rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(one, range(self.count)))


def random_batch(seed: int, sequences: int = 40, longest: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """(mask [T], cu_seqlens [N + 1]): runs of actions with tools' answers between, some sequences without an action,
    some without a token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (sequences,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mask = torch.rand(int(cu[-1]), generator=generator) < torch.rand(int(cu[-1]), generator=generator).round() * 0.9
    for i in range(0, sequences, 7):
        mask[cu[i] : cu[i + 1]] = False
    return mask, cu


def deal(cu: torch.Tensor, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each rank's (numbers of sequences, indices of their tokens, cu_seqlens of these); the first rank gets none."""
    home = torch.randint(1 if ranks > 1 else 0, ranks, (len(cu) - 1,), generator=torch.Generator().manual_seed(seed))
    shares = []
    for rank in range(ranks):
        own = (home == rank).nonzero().squeeze(1)
        tokens = [torch.arange(int(cu[i]), int(cu[i + 1])) for i in own]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), cu.diff()[own].cumsum(0)])
        shares.append((own, torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64), starts))
    return shares
