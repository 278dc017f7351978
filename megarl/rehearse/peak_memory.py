"""Bytes of living tensors and their peaks, counted without an allocator, so that tensors without bytes count, too."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.rehearse.comm_recorder import call_sites

CUDA_BLOCK = 512
"""Bytes to which CUDA's caching allocator rounds each storage up."""
_SKIPPED = tuple(
    str(Path(__file__).parents[1] / name)
    for name in (
        *("rehearse/peak_memory.py", "rehearse/host_reads.py", "rehearse/result_cache.py", "rehearse/step_costs.py"),
        "cpu/megatron_platform.py",
    )
)
"""Files of dispatch modes and of wrappers of torch's functions, which operations pass through."""


@dataclass(frozen=True)
class LiveTensors:
    """Storages of one kind that existed at a peak."""

    nbytes: int
    """Bytes of all of them together."""
    count: int
    tensor: str
    """Data type and shape of the tensor that an operation returned with each storage; empty for none."""
    calls: str
    """The lines of code that led to the operation, the innermost first."""


class PeakMemory(TorchDispatchMode):
    """Counts the storages of all tensors of one device that operations return within the block.

    A storage counts from the operation that returns it until nothing refers to it any more, autograd included. What a
    kernel allocates for itself and frees again is not seen, nor are operations of other threads.

    device_type: of the tensors that count, such as `meta`. block: bytes to which each storage is rounded up.
    records: record what `largest` needs.
    """

    def __init__(self, device_type: str, block: int = CUDA_BLOCK, records: bool = False) -> None:
        super().__init__()
        self.device_type, self.block = device_type, block
        self.live = 0
        """Bytes now."""
        self.peak = 0
        """The most bytes so far."""
        self.records = records
        self._sizes: dict[int, int] = {}
        self._history: list[tuple[int, int, tuple[str, str]]] = []
        """Storage, its new size, and shape and lines of code, of each change."""
        self._peak_position = 0
        """Length of the history at the peak."""
        self._labels: dict[tuple[str, str], tuple[str, str]] = {}
        """Each label once, so that equal ones share memory."""
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> PeakMemory:
        _active.append(self)
        resize = self._resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)  # no operation that a dispatch mode sees
            self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _active.remove(self)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before the block."""
        for tensor in tensors:
            self._count(tensor.untyped_storage())

    @contextmanager
    def phase(self) -> Iterator[list[int]]:
        """Give a list that holds the peak of the block at its end."""
        before, position = self.peak, self._peak_position
        self.peak, self._peak_position = self.live, len(self._history)
        result: list[int] = []
        try:
            yield result
        finally:
            result.append(self.peak)
            if before >= self.peak:
                self.peak, self._peak_position = before, position

    @contextmanager
    def without_intermediates(self) -> Iterator[None]:
        """Count for the peak only what exists before and after the block, as if it were one kernel."""
        before, position = self.peak, self._peak_position
        try:
            yield
        finally:
            self.peak, self._peak_position = before, position
            self._update_peak()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's wrapper of every call takes time

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and return its result."""
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.call(func, args, kwargs or {})
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                self._count(leaf.untyped_storage(), leaf)
        return result

    def largest(self, count: int) -> list[LiveTensors]:
        """Return what took the most bytes at the peak, the largest first. With `records` alone.

        Within `phase` this is about the peak of the block so far.
        """
        return _sort(self._group(self._peak_position))[:count]

    @property
    def position(self) -> int:
        """The number of changes so far, a point in time for `growth`."""
        return len(self._history)

    def growth(self, position: int, count: int) -> list[LiveTensors]:
        """Return what takes more bytes now than at an earlier `position`, that with the most first. With `records`
        alone."""
        before, now = self._group(position), self._group(len(self._history))
        grown = {label: sizes[len(before.get(label, ())) :] for label, sizes in now.items()}
        return _sort({label: sizes for label, sizes in grown.items() if sizes})[:count]

    def _group(self, position: int) -> dict[tuple[str, str], list[int]]:
        """Return the sizes of the storages that existed after so many changes, by shape and lines of code."""
        live: dict[int, tuple[int, tuple[str, str]]] = {}
        for key, size, label in self._history[:position]:
            if size:
                live[key] = size, live[key][1] if key in live else label
            else:
                live.pop(key, None)
        groups: dict[tuple[str, str], list[int]] = {}
        for size, label in live.values():
            groups.setdefault(label, []).append(size)
        return groups

    def _update_peak(self) -> None:
        if self.live > self.peak:
            self.peak, self._peak_position = self.live, len(self._history)

    def _count(self, storage: torch.UntypedStorage, tensor: torch.Tensor | None = None) -> None:
        if storage.device.type != self.device_type:
            return
        key, size = storage._cdata, -(-storage.nbytes() // self.block) * self.block
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        before = self._sizes.get(key)
        self.live += size - (before or 0)
        self._sizes[key] = size
        if self.records and size != before:
            shape = "" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            label = shape, call_sites(*_SKIPPED)
            self._history.append((key, size, self._labels.setdefault(label, label)))
        self._update_peak()

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        if self.records:
            self._history.append((key, 0, ("", "")))


def _sort(groups: Mapping[tuple[str, str], Sequence[int]]) -> list[LiveTensors]:
    result = [LiveTensors(sum(sizes), len(sizes), *label) for label, sizes in groups.items()]
    return sorted(result, key=lambda item: -item.nbytes)


_active: list[PeakMemory] = []


def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose intermediate results `PeakMemory` leaves out of the peak, like `torch.compile`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for memory in _active:
                stack.enter_context(memory.without_intermediates())
            return function(*args, **kwargs)

    return call
