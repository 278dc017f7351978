"""Costs of a rehearsed step besides device memory: matrix products and host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from megarl.rehearse.host_reads import HostReads
from megarl.rehearse.peak_memory import PeakMemory

_flops = 0


def count_flops() -> int:
    """Return the floating-point operations of this process's products so far, a multiplication and an addition each."""
    return _flops


def add_product(*sizes: int) -> None:
    """Count a matrix product that a stand-in leaves out.

    sizes: elements of one matrix, columns of the other, and the number of such products if it is not 1.
    """
    global _flops
    flops = 2
    for size in sizes:
        flops *= size
    _flops += flops


class StepCosts(HostReads):
    """Counts the matrix products of torch's operations and tensors in host memory, beside what `HostReads` does."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.host = PeakMemory("cpu", block=1)
        """Counts tensors in host memory."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        global _flops
        result = super().call(func, args, kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            _flops += formula(*args, **kwargs, out_val=result)
        return result

    def _count(self, storage: torch.UntypedStorage, tensor: torch.Tensor | None = None) -> None:
        if storage.device.type == self.host.device_type:
            self.host._count(storage)
        else:
            super()._count(storage, tensor)
