"""All ranks of a job, as far as values are concerned that are put together of what each of them has.

No process group here: `parallel.ranks` has the ranks that there are, `Alone` is one that has everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Adds up a small tensor over all ranks' shares of a batch: the same shape and dtype, the same bits on every rank."""


def local_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The `AllReduce` where one rank holds everything."""
    return x


class Comm(Protocol):
    """All ranks of a job, for values that are put together of what each has. Collective, and the same on all."""

    @property
    def rank(self) -> int: ...

    def all_reduce(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, which are small and of one shape."""
        ...

    def all_gather_rows(self, mine: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [N, ...], by rank; n may be another on each."""
        ...

    def all_gather_objects(self, mine: Any) -> list[Any]:
        """Small host values, by rank."""
        ...


class LocalComm:
    """One rank that has everything."""

    rank = 0

    def all_reduce(self, mine: torch.Tensor) -> torch.Tensor:
        return mine

    def all_gather_rows(self, mine: torch.Tensor) -> torch.Tensor:
        return mine

    def all_gather_objects(self, mine: Any) -> list[Any]:
        return [mine]


LOCAL = LocalComm()
