"""Host copies of a model: `WeightSnapshot` for rollbacks, and `MemoryOffload`, which frees the device for the engine.

Offloaded tensors keep their storages, which are resized to zero and refilled later. So all references to them
(parameters that are views of a buffer, Megatron's maps between the two) stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megarl.megatron import fsdp, optimizer
from megarl.megatron.parameter_names import unwrap
from megarl.parallel import device
from megarl.parallel.host_copy import HostCopy, storage_bytes


class MemoryOffload:
    """Tensors that are offloaded and onloaded together."""

    def __init__(self) -> None:
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []
        self._copy = HostCopy(0)
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []

    def offload(
        self, keep: Iterable[torch.Tensor], drop: Iterable[torch.Tensor] = (), exclude: Iterable[torch.Tensor] = ()
    ) -> int:
        """Free the device memory of these tensors and return the number of bytes freed.

        Nothing may use the tensors until `onload`. Does nothing and returns 0 if tensors are offloaded already.

        keep: tensors whose contents move to the host.
        drop: tensors whose contents are discarded, such as gradients between two steps.
        exclude: tensors whose storages stay on the device.
        """
        if self._offloaded or self._dropped:
            return 0
        excluded, offloaded, dropped = (
            distinct_storages(t for t in tensors if t.device.type == device.device().type and t.numel() > 1)
            for tensors in (exclude, keep, drop)
        )
        self._dropped = [(s, s.nbytes()) for address, s in dropped.items() if address not in excluded]
        self._offloaded = [
            (s, s.nbytes()) for address, s in offloaded.items() if address not in excluded and address not in dropped
        ]
        self._copy = HostCopy(sum(size for _, size in self._offloaded))
        self._copy.copy_from(storage_bytes(storage) for storage, _ in self._offloaded)
        for storage, _ in (*self._offloaded, *self._dropped):
            storage.resize_(0)
        device.empty_cache()
        return sum(size for _, size in (*self._offloaded, *self._dropped))

    def onload(self) -> None:
        """Reallocate the memory and restore its contents, zeros for dropped tensors. No-op if nothing is offloaded."""
        for storage, size in (*self._offloaded, *self._dropped):
            storage.resize_(size)
        self._copy.copy_back(storage_bytes(storage) for storage, _ in self._offloaded)
        for storage, _ in self._dropped:
            storage_bytes(storage).zero_()
        self._offloaded, self._copy, self._dropped = [], HostCopy(0), []


def distinct_storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of these tensors by torch's own address of each, except for empty ones.

    Parameters are views of buffers, and with fp32 weights the masters are views of the parameters. In a rehearsal all
    data have the address 0.
    """
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages if storage.nbytes()}


class WeightSnapshot:
    """A snapshot of one model's training state, for rollbacks. Empty until `capture`."""

    def __init__(self) -> None:
        self.host_copy = HostCopy(0)
        self._storages: list[torch.UntypedStorage] = []
        self._counts: list[Any] = []
        self._num_updates = 0
        """Updates of the schedule at capture."""
        self.previous_updates = 0
        """Updates of the model before its schedule was last restarted."""

    def capture(self, chunks: Sequence[torch.nn.Module], states: Any, scheduler: Any) -> None:
        """Copy the state to the host. The model must be onloaded."""
        self._storages = list(_trained_storages(chunks, states).values())
        size = sum(storage.nbytes() for storage in self._storages)
        if size != self.host_copy.size:  # on the first capture, and if the first step allocated the moments
            self.host_copy = HostCopy(0)  # free the old one first
            self.host_copy = HostCopy(size)
        self.host_copy.copy_from(map(storage_bytes, self._storages))
        self._counts = [float(holder["step"]) for holder in optimizer.iter_step_holders(states)]
        self._num_updates = int(scheduler.num_steps)

    def restore(self, chunks: Sequence[torch.nn.Module], states: Any) -> None:
        """Restore everything except for the schedule, which the caller restarts."""
        new_storages = _trained_storages(chunks, states)
        assert self._storages or not new_storages, "nothing was moved"
        for storage in self._storages:
            del new_storages[storage._cdata]  # every captured storage still exists
        self.host_copy.copy_back(map(storage_bytes, self._storages))
        for storage in new_storages.values():  # moments allocated since then, initially zeros
            storage_bytes(storage).zero_()
        holders = list(optimizer.iter_step_holders(states))
        for holder, count in zip(holders, self._counts or [0.0] * len(holders), strict=True):
            if isinstance(holder["step"], torch.Tensor):
                holder["step"].fill_(count)
            else:
                holder["step"] = int(count)
        self.previous_updates, self._num_updates = self.previous_updates + self._num_updates, 0


def _trained_storages(chunks: Sequence[torch.nn.Module], states: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of trained weights, buffers and optimizer states by address, in a fixed order."""
    weights = [*fsdp.trained_weights(chunks), *(buffer for chunk in chunks for buffer in unwrap(chunk).buffers())]
    return distinct_storages([*weights, *(tensor for tensor in optimizer.state_tensors(states) if tensor.dim())])
