"""Memory that processes of one machine share without copies, created by memfd_create: no name and no file.

A tensor keeps its memory alive; the last one of all processes frees it. A process that receives the file descriptor
maps the same pages privately: its writes change its own copy of a page only. A process that receives a handle of
`export_handle` maps them shared.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch


class MemoryRegion(NamedTuple):
    """Location of a tensor in shared memory: descriptor and size of the memory, offset of the tensor, in bytes."""

    descriptor: int
    size: int
    offset: int


_allocations: dict[int, tuple[int, int]] = {}
"""Descriptor and size of each allocation of this process that still has tensors, by address."""


def allocated_bytes() -> int:
    """Return the bytes of shared memory that this process has allocated and that still have tensors."""
    return sum(size for _, size in _allocations.values())


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a zero tensor in new shared memory. Its descriptor stays open while any tensor uses the memory."""
    size = prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    descriptor = create(size)
    memory = mmap.mmap(descriptor, size)
    tensor = torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
    address = tensor.data_ptr()
    _allocations[address] = descriptor, size
    finalizer = weakref.finalize(memory, _release, address, descriptor)
    finalizer.atexit = False  # tensors may be read until interpreter exit
    return tensor


def _release(address: int, descriptor: int) -> None:
    """Forget an allocation whose memory is unmapped. Another thread may have got memory at its address since then."""
    if _allocations.get(address, (-1, 0))[0] == descriptor:
        del _allocations[address]
    os.close(descriptor)


def find_region(tensor: torch.Tensor) -> MemoryRegion | None:
    """Return where a contiguous tensor lies in shared memory that this process allocated, or None."""
    address = tensor.untyped_storage().data_ptr()
    if address not in _allocations or not tensor.is_contiguous():
        return None
    return MemoryRegion(*_allocations[address], tensor.data_ptr() - address)


def create(size: int) -> int:
    """Return the descriptor of new, unmapped shared memory. The caller closes it."""
    descriptor = os.memfd_create("megarl", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def write(descriptor: int, pieces: Iterable[torch.Tensor]) -> None:
    """Write contiguous tensors one after another from the start of shared memory.

    Uses system calls instead of a mapping: the kernel then neither clears pages before they are filled nor takes page
    faults, which account for most of the time of a copy into new memory.
    """
    with open(descriptor, "wb", closefd=False) as stream:
        for piece in pieces:
            stream.write(piece.detach().reshape(-1).view(torch.uint8).numpy().data)


def attach(descriptor: int) -> torch.Tensor:
    """Map the memory behind a descriptor, without a copy, as [bytes] uint8. The descriptor may be closed afterwards."""
    size = os.fstat(descriptor).st_size
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=False, size=size, dtype=torch.uint8)


def export_handle(tensor: torch.Tensor) -> list[int]:
    """Return a handle with which any process of this user can map a contiguous tensor, see `map_handle`.

    Raises ValueError if the tensor is not in shared memory of this process.
    """
    if not tensor.nbytes:
        return [os.getpid(), -1, 0, 0, 0]
    region = find_region(tensor)
    if region is None:
        raise ValueError("the tensor is not in shared memory")
    return [os.getpid(), region.descriptor, os.fstat(region.descriptor).st_ino, region.offset, tensor.nbytes]


def map_handle(process: int, descriptor: int, inode: int, offset: int, size: int) -> torch.Tensor:
    """Map another process's tensor as [size] uint8; both see each other's writes. Raises OSError if it is gone."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    local_descriptor = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(local_descriptor).st_ino != inode:  # the descriptor number has been reused
            raise FileNotFoundError(f"process {process} no longer shares this memory")
        path = f"/proc/self/fd/{local_descriptor}"
        return torch.from_file(path, shared=True, size=offset + size, dtype=torch.uint8)[offset:]
    finally:
        os.close(local_descriptor)
