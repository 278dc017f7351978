"""Host memory into which a rank copies what a checkpoint is to have, while the originals go on changing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.parallel import device

ALIGNED = 64
"""Bytes at whose multiples a copy begins."""


class Staging:
    """One piece of memory, of what the copies take. It is kept from save to save, since to take pages anew costs more
    than to copy into them; copies are good until the next ones are made."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the host, each a tensor that has its memory for itself, as far as torch is told."""
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // ALIGNED) * ALIGNED
        if size != self.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # before there is another
            self._memory = torch.empty(size, dtype=torch.uint8, device=device.host())
        memory = self._memory.numpy()
        return [
            torch.from_numpy(memory[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape).copy_(tensor)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
