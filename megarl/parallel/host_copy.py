"""Copy device tensors to host memory: page-locked where there is a GPU, so that copies run at full speed.

torch allocates page-locked memory in powers of two (`pinned_max_round_threshold_mb` in PYTORCH_ALLOC_CONF is unlimited
by default), so 33 GB would take 64 GB. Here one allocation of exactly the needed size holds all tensors.

`StagingBuffer` is the host memory into which a rank copies its part of a checkpoint while training continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from megarl.parallel import device

MIN_PIECE_BYTES = 1 << 20
"""Bytes of the smallest piece, below which it makes no difference."""


class HostCopy:
    """Room for `size` bytes, taken once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pieces = [
            torch.empty(piece, dtype=torch.uint8, pin_memory=device.has_cuda()) for piece in _piece_sizes(size)
        ]

    def copy_from(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy what is in these; returns when it is here. They have no more than `size` bytes together."""
        for there, here in self._pair_slices(storages):
            here.copy_(there)

    def copy_back(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy it to where it was: storages of the same sizes in the same order."""
        for there, here in self._pair_slices(storages):
            there.copy_(here)

    def _pair_slices(self, storages: Iterable[torch.UntypedStorage]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        pieces = iter(self.pieces)
        room = torch.empty(0, dtype=torch.uint8)
        for storage in storages:
            left = as_bytes(storage)
            while len(left):
                if not len(room):
                    room = next(pieces)
                count = min(len(left), len(room))
                yield left[:count], room[:count]
                left, room = left[count:], room[count:]


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """[bytes] uint8 on the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _piece_sizes(size: int) -> Iterator[int]:
    """Powers of two that have so much room together and less than `LEAST` more."""
    while size > 0:
        piece = max(MIN_PIECE_BYTES, 1 << (size.bit_length() - 1))
        yield piece
        size -= piece


ALIGNMENT = 64
"""Bytes at whose multiples a copy begins."""


class StagingBuffer:
    """One piece of memory, of what the copies take. It is kept from save to save, since to take pages anew costs more
    than to copy into them; copies are good until the next ones are made."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the host, each a tensor that has its memory for itself, as far as torch is told."""
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if size != self.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # before there is another
            self._memory = torch.empty(size, dtype=torch.uint8, device=device.host())
        memory = self._memory.numpy()
        return [
            torch.from_numpy(memory[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape).copy_(tensor)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
