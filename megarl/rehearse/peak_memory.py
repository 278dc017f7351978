"""Bytes of living tensors and their peaks, counted without an allocator, so that tensors without bytes count, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA_BLOCK = 512
"""Bytes to which CUDA's caching allocator rounds each storage up."""


class PeakMemory(TorchDispatchMode):
    """Counts the storages of all tensors of one device that operations return within the block.

    A storage counts from the operation that returns it until nothing refers to it any more, autograd included. What a
    kernel allocates for itself and frees again is not seen, nor are operations of other threads.

    device_type: of the tensors that count, such as `meta`. block: bytes to which each storage is rounded up.
    """

    def __init__(self, device_type: str, block: int = CUDA_BLOCK) -> None:
        super().__init__()
        self.device_type, self.block = device_type, block
        self.live = 0
        """Bytes now."""
        self.peak = 0
        """The most bytes so far."""
        self._sizes: dict[int, int] = {}
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> PeakMemory:
        resize = self._resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)  # no operation that a dispatch mode sees
            self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before the block."""
        for tensor in tensors:
            self._count(tensor.untyped_storage())

    @contextmanager
    def phase(self) -> Iterator[list[int]]:
        """Give a list that holds the peak of the block at its end."""
        before, self.peak = self.peak, self.live
        result: list[int] = []
        try:
            yield result
        finally:
            result.append(self.peak)
            self.peak = max(before, self.peak)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != self.device_type:
            return
        key, size = storage._cdata, -(-storage.nbytes() // self.block) * self.block
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
