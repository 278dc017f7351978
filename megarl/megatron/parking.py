"""A model's memory given to somebody else for a while: its weights and optimizer states go to the host.

Tensors keep their storages, which are emptied and later filled again, so that whatever refers to them (parameters that
are views of a buffer, Megatron's maps from one to the other) need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from megarl.parallel import device


class Parking:
    """What can be parked, asked for anew each time: `keep()` gives tensors whose values are kept, `drop()` those that
    come back as zeros, such as gradients between two steps."""

    def __init__(self, keep: Callable[[], Iterable[torch.Tensor]], drop: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._keep, self._drop = keep, drop
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def parked(self) -> bool:
        return bool(self._kept or self._dropped)

    def park(self) -> int:
        """Free the device's memory; returns how many bytes. Nothing may use the tensors until `restore`."""
        if self.parked:
            return 0
        dropped = _storages(self._drop())
        kept = {place: storage for place, storage in _storages(self._keep()).items() if place not in dropped}
        for storage in kept.values():
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copy = torch.empty(len(content), dtype=torch.uint8, pin_memory=device.has_cuda())
            self._kept.append((storage, copy.copy_(content)))
        self._dropped = [(storage, storage.nbytes()) for storage in dropped.values()]
        for storage in (*kept.values(), *dropped.values()):
            storage.resize_(0)
        device.empty_cache()
        return sum(len(copy) for _, copy in self._kept) + sum(size for _, size in self._dropped)

    def restore(self) -> None:
        """Take the memory again and fill it; nothing where nothing is parked."""
        for storage, copy in self._kept:
            storage.resize_(len(copy))
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(copy)
        for storage, size in self._dropped:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self._kept, self._dropped = [], []


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each storage once, by address; several tensors may be views of one. Scalars on the host, such as step counts,
    stay where they are."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in tensors
        if tensor.device.type == device.device().type and tensor.numel() > 1
    }
