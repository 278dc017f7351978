"""Collectives over all ranks of a job, for code that must not depend on `torch.distributed`.

This module has no process groups: `parallel.ranks` implements `Comm` for real ranks, `LocalComm` for a single one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a small tensor over all ranks' shares of a batch. Same shape and dtype, bitwise equal on every rank."""


class Comm(Protocol):
    """Communicator over all ranks of a job. Every method is collective and returns the same on all ranks."""

    @property
    def rank(self) -> int: ...

    def all_reduce(self, local: torch.Tensor) -> torch.Tensor:
        """Sum small tensors of equal shape."""
        ...

    def all_gather_rows(self, local: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [N, ...], ordered by rank; n may differ between ranks."""
        ...

    def all_gather_objects(self, local: Any) -> list[Any]:
        """Gather small host values, ordered by rank."""
        ...


class LocalComm:
    """`Comm` of a single rank."""

    rank = 0

    def all_reduce(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def all_gather_rows(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def all_gather_objects(self, local: Any) -> list[Any]:
        return [local]


LOCAL = LocalComm()
local_all_reduce: AllReduce = LOCAL.all_reduce
