"""Memory that processes of one machine share without a copy: made by memfd_create, so without a name or a file.

Nothing of it outlives its processes, however they end, and no limit of /dev/shm holds for it. A tensor onto such memory
keeps it; with the last one it goes. Whoever is handed the file descriptor maps the same pages. It maps them privately:
writing into them changes the writer's own copy of a page and nobody else's. Whoever is told the numbers of `share` maps
them as they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

_MAP_NORESERVE = 0x4000  # the mmap module has no name for it in Python 3.11
_MAX_IOVECS = 512  # pieces of one write; the kernel takes 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class MemoryRegion:
    """Where a tensor lies in shared memory: the memory's descriptor, its size and the tensor's offset, in bytes."""

    descriptor: int
    size: int
    offset: int


_allocations: dict[int, tuple[int, int]] = {}
"""Descriptor and bytes of each memory that this process has made and still has tensors on, by address."""


def allocated_bytes() -> int:
    """Bytes of shared memory that this process has made and still has tensors on."""
    return sum(size for _, size in _allocations.values())


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of new shared memory, zeros. Its descriptor stays open for as long as there is a tensor onto it."""
    count = 1
    for size in shape:
        count *= size
    size = count * dtype.itemsize
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    descriptor = create(size)
    return _map_tensor(descriptor, size, mmap.MAP_SHARED, made=True).view(dtype).view(tuple(shape))


def find_region(tensor: torch.Tensor) -> MemoryRegion | None:
    """Where a contiguous tensor lies in shared memory of this process's making, or None."""
    address = tensor.untyped_storage().data_ptr()
    if address not in _allocations or not tensor.is_contiguous():
        return None
    descriptor, size = _allocations[address]
    return MemoryRegion(descriptor, size, tensor.data_ptr() - address)


def create(size: int) -> int:
    """The descriptor of new shared memory, which nobody has mapped. Whoever asks closes it."""
    descriptor = os.memfd_create("megarl", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def write(descriptor: int, pieces: Iterable[torch.Tensor]) -> int:
    """Write contiguous tensors one after another into shared memory from its start; the bytes written.

    By system calls, not through a mapping: so the kernel neither clears a page before it is filled nor takes a fault
    for it, which is most of the time that a copy into new memory takes.
    """
    offset, waiting = 0, []
    for piece in pieces:
        if piece.numel():
            waiting.append(_bytes(piece).numpy().data)
        if len(waiting) == _MAX_IOVECS:
            offset = _write(descriptor, waiting, offset)
            waiting = []
    return _write(descriptor, waiting, offset)


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
    """The memory behind a descriptor, [bytes] uint8, without a copy. The descriptor may be closed then."""
    size = os.fstat(descriptor).st_size
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return _map_tensor(descriptor, size, mmap.MAP_PRIVATE | _MAP_NORESERVE, made=False)


def export_handle(tensor: torch.Tensor) -> list[int]:
    """Numbers by which any process of this user can map a contiguous tensor in memory of this process's making, see
    `map_handle`. Raises ValueError for any other tensor."""
    size = tensor.numel() * tensor.element_size()
    place = find_region(tensor)
    if place is None and size:
        raise ValueError("the tensor does not lie in shared memory")
    if place is None:
        return [os.getpid(), -1, 0, 0, 0]
    return [os.getpid(), place.descriptor, os.fstat(place.descriptor).st_ino, place.offset, size]


def map_handle(process: int, descriptor: int, inode: int, offset: int, size: int) -> torch.Tensor:
    """The bytes of a tensor that another process shares, [size] uint8: what either writes the other sees. Raises
    OSError where they are not there any more."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(own).st_ino != inode:  # the number is another file's by now
            raise FileNotFoundError(f"process {process} shares this memory no longer")
        return _map_tensor(own, offset + size, mmap.MAP_SHARED, made=False)[offset:]
    finally:
        os.close(own)


def _map_tensor(descriptor: int, size: int, flags: int, made: bool) -> torch.Tensor:
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {size} bytes of shared memory: {os.strerror(error)}")
    if made:
        _allocations[address] = descriptor, size
    block = (ctypes.c_uint8 * size).from_address(address)  # the tensor's storage keeps it
    weakref.finalize(block, _unmap, address, size, made).atexit = False  # tensors may be read until the very end
    return torch.frombuffer(block, dtype=torch.uint8)


def _unmap(address: int, size: int, made: bool) -> None:
    if made:
        os.close(_allocations.pop(address)[0])
    _libc.munmap(address, size)
