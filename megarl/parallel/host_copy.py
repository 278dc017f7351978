"""Host memory for copies of device tensors: `HostCopy` of a model's state, `StagingBuffer` of a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from megarl.parallel import device

MIN_PIECE_BYTES = 1 << 20
"""Size of the smallest piece in bytes; the rounding below it is negligible."""


class HostCopy:
    """A host buffer of `size` bytes, allocated once, and pinned if there is a GPU, so that copies run at full speed.

    torch rounds pinned allocations up to powers of two (`pinned_max_round_threshold_mb` in PYTORCH_ALLOC_CONF is
    unlimited by default), so 33 GB would take 64 GB. The pieces have sizes of powers of two that add up to `size`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.pieces: list[torch.Tensor] = []
        while size > 0:
            piece = max(MIN_PIECE_BYTES, 1 << (size.bit_length() - 1))
            self.pieces.append(torch.empty(piece, dtype=torch.uint8, pin_memory=device.has_cuda()))
            size -= piece

    # Sources and targets are views [bytes] uint8 of at most `size` bytes in all: `storage_bytes`, `tensor_bytes`.

    def copy_from(self, sources: Iterable[torch.Tensor]) -> None:
        """Copy the sources into the buffer, one behind the other, synchronously."""
        for source, kept in self._pair_slices(sources):
            kept.copy_(source)

    def copy_back(self, targets: Iterable[torch.Tensor]) -> None:
        """Copy the buffer back to targets of the same sizes in the same order."""
        for target, kept in self._pair_slices(targets):
            target.copy_(kept)

    def exchange(self, targets: Iterable[torch.Tensor]) -> None:
        """Exchange the contents of the buffer with those of targets of the same sizes in the same order.

        Needs as much device memory as the largest target. The device may still be copying on return: wait for it before
        reading the buffer on the host.
        """
        for target, kept in self._pair_slices(targets):
            previous = target.clone()
            target.copy_(kept, non_blocking=True)
            kept.copy_(previous, non_blocking=True)

    def _pair_slices(self, sources: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair the bytes of each source with their place in the buffer."""
        pieces = iter(self.pieces)
        free = torch.empty(0, dtype=torch.uint8)
        for remaining in sources:
            while len(remaining):
                if not len(free):
                    free = next(pieces)
                count = min(len(remaining), len(free))
                yield remaining[:count], free[:count]
                remaining, free = remaining[count:], free[count:]


PINNED_CHUNK_BYTES = 1 << 30
"""Size of an allocation of `allocate_pinned`, a power of two, unless a tensor is larger or all are smaller."""


def allocate_pinned(shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Return host tensors of these shapes, fp32 and uninitialized, pinned if there is a GPU.

    They share allocations of powers of two, the largest first, so that each is more than half full. torch would round
    up every single one (see `HostCopy`).
    """
    tensors, free = [torch.empty(0)] * len(shapes), torch.empty(0)
    missing = sum(shape.numel() for shape in shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -shapes[i].numel()):
        size = shapes[i].numel()
        if size > len(free):
            count = max(size, min(PINNED_CHUNK_BYTES // 4, missing))
            free = torch.empty(1 << (count - 1).bit_length(), pin_memory=device.has_cuda())
        tensors[i], free = free[:size].view(shapes[i]), free[size:]
        missing -= size
    return tensors


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """View a storage as [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as [bytes] uint8."""
    return tensor.detach().view(-1).view(torch.uint8)


ALIGNMENT = 64
"""Alignment of each copy in bytes."""


class StagingBuffer:
    """One host allocation for all copies of a save, reused from save to save.

    New pages cost more than the copy into them. Tensors are valid until the next call.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def allocate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return host tensors of the same shapes and types. torch sees each as a tensor with a storage of its own."""
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if size != self.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old buffer first
            self._memory = torch.empty(size, dtype=torch.uint8)
        memory = self._memory.numpy()
        return [
            torch.from_numpy(memory[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]


class DeferredCopy:
    """A copy of tensors to the host, made by a thread while nothing changes them.

    Code that is about to change a source calls `wait`. The first of both threads makes the copy, so that a caller never
    waits for a thread that has not begun.

    pairs: (source, host tensor of the same shape and type).
    waiting: context of a wait, to measure it.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._pairs = list(pairs)
        self._waiting = waiting
        self._is_complete = not self._pairs
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._stream = device.make_side_stream()  # ordered behind the update that computed the sources

    def complete(self) -> None:
        """Make the copy unless another thread makes it, and wait for it. Raises its error."""
        self._run()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Return once the sources may change. An error is left to `complete`."""
        if not self._is_complete:
            with self._waiting():
                self._run()

    def _run(self) -> None:
        with self._lock:
            if self._is_complete:
                return
            try:
                self._copy()
            except Exception as error:  # noqa: BLE001  raised by `complete`
                self._error = error
            self._pairs, self._is_complete = [], True

    def _copy(self) -> None:
        if self._stream is None:
            for source, target in self._pairs:
                target.copy_(source)
        else:
            torch.cuda.set_device(self._stream.device)  # a new thread has GPU 0, and would take memory there
            with torch.cuda.stream(self._stream):
                _copy_in_pieces(self._pairs, self._stream)


PINNED_PIECE_BYTES = 32 << 20
"""Size of each of the two pinned pieces through which `DeferredCopy` reads a GPU's memory."""


def _copy_in_pieces(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], stream: torch.cuda.Stream) -> None:
    """Copy to pageable host memory through two pinned pieces: the GPU fills one while the host empties the other.

    `stream` is the current stream. Pinning all of the targets would lock as much memory as the rank's state, for good.
    """
    free = [torch.empty(PINNED_PIECE_BYTES, dtype=torch.uint8, pin_memory=device.has_cuda()) for _ in range(2)]
    filled: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event] | None = None

    def empty(piece: torch.Tensor, target: torch.Tensor, event: torch.cuda.Event) -> None:
        event.synchronize()
        target.copy_(piece[: len(target)])
        free.append(piece)

    for source, target in pairs:
        if not source.is_cuda:  # optimizer states on the host
            target.copy_(source)
            continue
        parts = (tensor_bytes(tensor.contiguous()).split(PINNED_PIECE_BYTES) for tensor in (source, target))
        for source_bytes, target_bytes in zip(*parts, strict=True):
            piece = free.pop()
            piece[: len(source_bytes)].copy_(source_bytes, non_blocking=True)
            previous, filled = filled, (piece, target_bytes, stream.record_event())
            if previous is not None:
                empty(*previous)
    if filled is not None:
        empty(*filled)
