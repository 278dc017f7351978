"""Host copies of a model: `WeightSnapshot`, a snapshot to roll back to, and `MemoryOffload`, which frees the device for the engine.

A snapshot is one copy of this rank's part, in memory that is allocated once: the trained weights and this rank's
share of masters and moments, as `models.memory.state_bytes` counts them without gradients. It is pinned on machines
with GPUs. Taking it costs one copy of these bytes to the host.

Parked tensors keep their storages, which are resized to zero and refilled later. Whatever refers to them (parameters
that are views of a buffer, Megatron's maps between the two) stays valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megarl.megatron import optimizer
from megarl.megatron.parameter_names import unwrap
from megarl.parallel import device
from megarl.parallel.host_copy import HostCopy, as_bytes


class MemoryOffload:
    """Tensors that leave the device together."""

    def __init__(self) -> None:
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []
        self._copy = HostCopy(0)
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []

    def offload(
        self, keep: Iterable[torch.Tensor], drop: Iterable[torch.Tensor] = (), but: Iterable[torch.Tensor] = ()
    ) -> int:
        """Free the memory of these tensors, of `drop` without keeping what is in it, as of gradients between two steps;
        returns how many bytes. What shares memory with `but` stays. Nothing may use them until `restore`."""
        if self._offloaded or self._dropped:
            return 0
        staying = device_storages(but)
        dropped = {place: storage for place, storage in device_storages(drop).items() if place not in staying}
        leaving = [s for place, s in device_storages(keep).items() if place not in staying and place not in dropped]
        sizes = [storage.nbytes() for storage in leaving]
        self._copy = HostCopy(sum(sizes))
        self._copy.copy_from(leaving)
        self._offloaded = list(zip(leaving, sizes, strict=True))
        self._dropped = [(storage, storage.nbytes()) for storage in dropped.values()]
        for storage, _ in (*self._offloaded, *self._dropped):
            storage.resize_(0)
        device.empty_cache()
        return sum(size for _, size in (*self._offloaded, *self._dropped))

    def onload(self) -> None:
        """Take the memory again and fill it, with zeros what was dropped; nothing where nothing is parked."""
        for storage, size in (*self._offloaded, *self._dropped):
            storage.resize_(size)
        self._copy.copy_back([storage for storage, _ in self._offloaded])
        for storage, _ in self._dropped:
            as_bytes(storage).zero_()
        self._offloaded, self._copy, self._dropped = [], HostCopy(0), []


def device_storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The memory of these tensors on the device, each piece once, by address. Step counts and the like stay out."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in tensors
        if tensor.device.type == device.device().type and tensor.numel() > 1 and tensor.untyped_storage().nbytes()
    }


class WeightSnapshot:
    """Of one model. Empty until `take`."""

    def __init__(self) -> None:
        self._copy = HostCopy(0)
        self._storages: list[torch.UntypedStorage] = []
        self._counts: list[Any] = []
        self._num_updates = 0
        """Of the schedule, when it was taken."""
        self.previous_updates = 0
        """Updates of the model before its schedule began anew."""

    def capture(self, chunks: Sequence[torch.nn.Module], states: Any, scheduler: Any) -> None:
        """The model must be on the device, as whenever it is at work."""
        self._storages = list(_trained_storages(chunks, states))
        size = sum(storage.nbytes() for storage in self._storages)
        if size != self._copy.size:  # the first time; and the second, where moments are made in the first step
            self._copy = HostCopy(0)
            self._copy = HostCopy(size)
        self._copy.copy_from(self._storages)
        self._counts = [float(holder["step"]) for holder in optimizer.iter_step_holders(states)]
        self._num_updates = int(scheduler.num_steps)

    def restore(self, chunks: Sequence[torch.nn.Module], states: Any) -> None:
        """All of it, but for the schedule, which shall begin anew."""
        since = {storage.data_ptr(): storage for storage in _trained_storages(chunks, states)}
        assert self._storages or not since, "nothing was taken"
        for storage in self._storages:
            del since[storage.data_ptr()]  # what was taken is what is there
        self._copy.copy_back(self._storages)
        for storage in since.values():  # moments that were made since then, of zeros
            as_bytes(storage).zero_()
        holders = list(optimizer.iter_step_holders(states))
        for holder, count in zip(holders, self._counts or [0.0] * len(holders), strict=True):
            if isinstance(holder["step"], torch.Tensor):
                holder["step"].fill_(count)
            else:
                holder["step"] = int(count)
        self.previous_updates, self._num_updates = self.previous_updates + self._num_updates, 0

    @property
    def nbytes(self) -> int:
        return self._copy.size


def _trained_storages(chunks: Sequence[torch.nn.Module], states: Any) -> Iterator[torch.UntypedStorage]:
    """Each piece of memory once, in the same order every time: parameters are views of buffers, and in fp32 masters are
    views of the parameters."""
    seen = set()
    for chunk in chunks:
        model = unwrap(chunk)
        for tensor in (*(param for param in model.parameters() if param.requires_grad), *model.buffers()):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage
    for tensor in optimizer.state_tensors(states):
        storage = tensor.untyped_storage()
        if tensor.dim() and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage
