"""Memory that processes of one machine share without copies, created by memfd_create: no name and no file.

It never outlives its processes, and the limit of /dev/shm does not apply. A tensor keeps its memory alive; the last one
frees it. A process that receives the file descriptor maps the same pages privately: its writes change its own copy of a
page only. A process that receives a handle of `export_handle` maps them shared.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

_MAP_NORESERVE = 0x4000  # missing from the mmap module of Python 3.11
_MAX_IOVECS = 512  # buffers per write; the kernel's limit is 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class MemoryRegion:
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
    count = 1
    for size in shape:
        count *= size
    size = count * dtype.itemsize
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    descriptor = create(size)
    return _map_tensor(descriptor, size, mmap.MAP_SHARED, is_allocated=True).view(dtype).view(tuple(shape))


def find_region(tensor: torch.Tensor) -> MemoryRegion | None:
    """Return where a contiguous tensor lies in shared memory that this process allocated, or None."""
    address = tensor.untyped_storage().data_ptr()
    if address not in _allocations or not tensor.is_contiguous():
        return None
    descriptor, size = _allocations[address]
    return MemoryRegion(descriptor, size, tensor.data_ptr() - address)


def create(size: int) -> int:
    """Return the descriptor of new, unmapped shared memory. The caller closes it."""
    descriptor = os.memfd_create("megarl", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def write(descriptor: int, pieces: Iterable[torch.Tensor]) -> int:
    """Write contiguous tensors one after another from the start of shared memory; return the bytes written.

    Uses system calls instead of a mapping: the kernel then neither clears pages before they are filled nor takes page
    faults, which account for most of the time of a copy into new memory.
    """
    offset, buffers = 0, []
    for piece in pieces:
        if piece.numel():
            buffers.append(_bytes(piece).numpy().data)
        if len(buffers) == _MAX_IOVECS:
            offset = _write(descriptor, buffers, offset)
            buffers = []
    return _write(descriptor, buffers, offset)


def _write(descriptor: int, waiting: list[memoryview], offset: int) -> int:
    while waiting:
        written = os.pwritev(descriptor, waiting, offset)  # at most 2 GB at once
        offset += written
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.pop(0))
        if waiting:
            waiting[0] = waiting[0][written:]
    return offset


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def attach(descriptor: int) -> torch.Tensor:
    """Map the memory behind a descriptor, without a copy, as [bytes] uint8. The descriptor may be closed afterwards."""
    size = os.fstat(descriptor).st_size
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return _map_tensor(descriptor, size, mmap.MAP_PRIVATE | _MAP_NORESERVE, is_allocated=False)


def export_handle(tensor: torch.Tensor) -> list[int]:
    """Return a handle with which any process of this user can map a contiguous tensor, see `map_handle`.

    Raises ValueError if the tensor is not in shared memory of this process.
    """
    size = tensor.numel() * tensor.element_size()
    region = find_region(tensor)
    if region is None and size:
        raise ValueError("the tensor is not in shared memory")
    if region is None:
        return [os.getpid(), -1, 0, 0, 0]
    return [os.getpid(), region.descriptor, os.fstat(region.descriptor).st_ino, region.offset, size]


def map_handle(process: int, descriptor: int, inode: int, offset: int, size: int) -> torch.Tensor:
    """Map another process's tensor as [size] uint8; both see each other's writes. Raises OSError if it is gone."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    local_descriptor = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(local_descriptor).st_ino != inode:  # the descriptor number has been reused
            raise FileNotFoundError(f"process {process} no longer shares this memory")
        return _map_tensor(local_descriptor, offset + size, mmap.MAP_SHARED, is_allocated=False)[offset:]
    finally:
        os.close(local_descriptor)


def _map_tensor(descriptor: int, size: int, flags: int, is_allocated: bool) -> torch.Tensor:
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {size} bytes of shared memory: {os.strerror(error)}")
    if is_allocated:
        _allocations[address] = descriptor, size
    block = (ctypes.c_uint8 * size).from_address(address)  # the tensor's storage keeps it alive
    finalizer = weakref.finalize(block, _unmap, address, size, is_allocated)
    finalizer.atexit = False  # tensors may be read until interpreter exit
    return torch.frombuffer(block, dtype=torch.uint8)


def _unmap(address: int, size: int, is_allocated: bool) -> None:
    if is_allocated:
        os.close(_allocations.pop(address)[0])
    _libc.munmap(address, size)
