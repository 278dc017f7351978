"""A model's memory given to somebody else for a while: its tensors' contents go to the host.

Tensors keep their storages, which are emptied and later filled again, so that whatever refers to them (parameters that
are views of a buffer, Megatron's maps from one to the other) need not know.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megarl.parallel import device


class Parking:
    """Tensors that leave the device together."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []

    def park(
        self, keep: Iterable[torch.Tensor], drop: Iterable[torch.Tensor] = (), but: Iterable[torch.Tensor] = ()
    ) -> int:
        """Free the memory of these tensors, of `drop` without keeping what is in it, as of gradients between two steps;
        returns how many bytes. What shares memory with `but` stays. Nothing may use them until `restore`."""
        if self._kept or self._dropped:
            return 0
        staying = storages(but)
        dropped = {place: storage for place, storage in storages(drop).items() if place not in staying}
        for place, storage in storages(keep).items():
            if place not in staying and place not in dropped:
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.has_cuda())
                self._kept.append((storage, copy.copy_(content(storage))))
        self._dropped = [(storage, storage.nbytes()) for storage in dropped.values()]
        freed = sum(storage.nbytes() for storage, _ in (*self._kept, *self._dropped))
        for storage, _ in (*self._kept, *self._dropped):
            storage.resize_(0)
        device.empty_cache()
        return freed

    def restore(self) -> None:
        """Take the memory again and fill it, with zeros what was dropped; nothing where nothing is parked."""
        for storage, copy in self._kept:
            storage.resize_(len(copy))
            content(storage).copy_(copy)
        for storage, size in self._dropped:
            storage.resize_(size)
            content(storage).zero_()
        self._kept, self._dropped = [], []


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The memory of these tensors on the device, each piece once, by address. Step counts and the like stay out."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in tensors
        if tensor.device.type == device.device().type and tensor.numel() > 1 and tensor.untyped_storage().nbytes()
    }


def content(storage: torch.UntypedStorage) -> torch.Tensor:
    """[bytes] uint8 on the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
