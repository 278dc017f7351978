"""A trained model as it was: a copy on the host of what an update changes, to go back to.

One copy, of this rank's part, in memory that is taken once: trained weights, and this rank's share of masters and
moments, as `models.memory.state_bytes` counts them without the gradients. Pinned on a machine with GPUs. What it takes
is one trip of these bytes to the host each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megarl.megatron import optimizer
from megarl.megatron.names import unwrap
from megarl.parallel.host_copy import HostCopy, content


class Kept:
    """Of one model. Empty until `take`."""

    def __init__(self) -> None:
        self._copy = HostCopy(0)
        self._taken: list[torch.UntypedStorage] = []
        self._counts: list[Any] = []
        self._updates = 0
        """Of the schedule, when it was taken."""
        self.before = 0
        """Updates of the model before its schedule began anew."""

    def take(self, chunks: Sequence[torch.nn.Module], states: Any, scheduler: Any) -> None:
        """The model must be on the device, as whenever it is at work."""
        self._taken = list(_changing(chunks, states))
        size = sum(storage.nbytes() for storage in self._taken)
        if size != self._copy.size:  # the first time; and the second, where moments are made in the first step
            self._copy = HostCopy(0)
            self._copy = HostCopy(size)
        self._copy.take(self._taken)
        self._counts = [float(holder["step"]) for holder in optimizer.counts(states)]
        self._updates = int(scheduler.num_steps)

    def put_back(self, chunks: Sequence[torch.nn.Module], states: Any) -> None:
        """All of it, but for the schedule, which shall begin anew."""
        since = {storage.data_ptr(): storage for storage in _changing(chunks, states)}
        assert self._taken or not since, "nothing was taken"
        for storage in self._taken:
            del since[storage.data_ptr()]  # what was taken is what is there
        self._copy.put_back(self._taken)
        for storage in since.values():  # moments that were made since then, of zeros
            content(storage).zero_()
        holders = list(optimizer.counts(states))
        for holder, count in zip(holders, self._counts or [0.0] * len(holders), strict=True):
            if isinstance(holder["step"], torch.Tensor):
                holder["step"].fill_(count)
            else:
                holder["step"] = int(count)
        self.before, self._updates = self.before + self._updates, 0

    @property
    def nbytes(self) -> int:
        return self._copy.size


def _changing(chunks: Sequence[torch.nn.Module], states: Any) -> Iterator[torch.UntypedStorage]:
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
