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
from megarl.parallel.host_copy import HostCopy


class Kept:
    """Of one model. Empty until `take`."""

    def __init__(self) -> None:
        self._copy: HostCopy | None = None
        self._counts: list[Any] = []
        self._updates = 0
        """Of the schedule, when it was taken."""
        self.before = 0
        """Updates of the model before its schedule began anew."""

    def take(self, chunks: Sequence[torch.nn.Module], states: Any, scheduler: Any) -> None:
        """The model must be on the device, as whenever it is at work."""
        changing = list(_changing(chunks, states))
        if self._copy is None:
            self._copy = HostCopy(sum(storage.nbytes() for storage in changing))
        self._copy.take(changing)
        self._counts = [float(holder["step"]) for holder in optimizer.counts(states)]
        self._updates = int(scheduler.num_steps)

    def put_back(self, chunks: Sequence[torch.nn.Module], states: Any) -> None:
        """All of it, but for the schedule, which shall begin anew."""
        assert self._copy is not None
        self._copy.put_back(list(_changing(chunks, states)))
        for holder, count in zip(optimizer.counts(states), self._counts, strict=True):
            if isinstance(holder["step"], torch.Tensor):
                holder["step"].fill_(count)
            else:
                holder["step"] = int(count)
        self.before, self._updates = self.before + self._updates, 0

    @property
    def nbytes(self) -> int:
        return 0 if self._copy is None else self._copy.size


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
