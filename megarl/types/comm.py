"""All ranks of a job, as far as values are concerned that are put together of what each of them has.

No process group here: `parallel.ranks` has the ranks that there are, `Alone` is one that has everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Total = Callable[[torch.Tensor], torch.Tensor]
"""Adds up a small tensor over all ranks' shares of a batch: the same shape and dtype, the same bits on every rank."""


def alone(x: torch.Tensor) -> torch.Tensor:
    """The `Total` where one rank holds everything."""
    return x


class Everyone(Protocol):
    """All ranks of a job, for values that are put together of what each has. Collective, and the same on all."""

    @property
    def rank(self) -> int: ...

    def total(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, which are small and of one shape."""
        ...

    def rows(self, mine: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [N, ...], by rank; n may be another on each."""
        ...

    def objects(self, mine: Any) -> list[Any]:
        """Small host values, by rank."""
        ...


class Alone:
    """One rank that has everything."""

    rank = 0

    def total(self, mine: torch.Tensor) -> torch.Tensor:
        return mine

    def rows(self, mine: torch.Tensor) -> torch.Tensor:
        return mine

    def objects(self, mine: Any) -> list[Any]:
        return [mine]


ALONE = Alone()
