"""A model's memory given to somebody else for a while: its tensors' contents go to the host.

Tensors keep their storages, which are emptied and later filled again, so that whatever refers to them (parameters that
are views of a buffer, Megatron's maps from one to the other) need not know.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megarl.parallel import device
from megarl.parallel.host_copy import HostCopy, content


class Parking:
    """Tensors that leave the device together."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, int]] = []
        self._copy = HostCopy(0)
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
        leaving = [s for place, s in storages(keep).items() if place not in staying and place not in dropped]
        sizes = [storage.nbytes() for storage in leaving]
        self._copy = HostCopy(sum(sizes))
        self._copy.take(leaving)
        self._kept = list(zip(leaving, sizes, strict=True))
        self._dropped = [(storage, storage.nbytes()) for storage in dropped.values()]
        for storage, _ in (*self._kept, *self._dropped):
            storage.resize_(0)
        device.empty_cache()
        return sum(size for _, size in (*self._kept, *self._dropped))

    def restore(self) -> None:
        """Take the memory again and fill it, with zeros what was dropped; nothing where nothing is parked."""
        for storage, size in (*self._kept, *self._dropped):
            storage.resize_(size)
        self._copy.put_back([storage for storage, _ in self._kept])
        for storage, _ in self._dropped:
            content(storage).zero_()
        self._kept, self._copy, self._dropped = [], HostCopy(0), []


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The memory of these tensors on the device, each piece once, by address. Step counts and the like stay out."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in tensors
        if tensor.device.type == device.device().type and tensor.numel() > 1 and tensor.untyped_storage().nbytes()
    }
