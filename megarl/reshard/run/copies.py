"""Copy many boxes of tensors into one buffer of bytes, and out of it, by loops that define the result on a CPU and by a
single kernel launch on CUDA (`triton_kernels.py`). Tensors on `meta`, which have no bytes, are checked alone: like the
kernels, that allocates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megarl.models import int4
from megarl.models.fp8 import FP8, grid_shape, quantise
from megarl.reshard.run.checksum import device_hash
from megarl.reshard.run.scale_grids import BlockScales

Box = tuple[torch.Tensor, int]
"""(view, offset): a view [rows, columns] of any dtype, with adjacent elements within a row, and the byte offset of
its elements in the buffer, row by row. The offset is a multiple of the element size."""


def pack(boxes: Sequence[Box], buffer: torch.Tensor) -> None:
    """Copy boxes into a buffer, uint8 [n]. Raises ValueError, before writing anything, if a box does not fit."""
    for view, offset in boxes:
        _check_box(view, offset, buffer, view.dtype)
    if buffer.is_meta:
        return
    if buffer.is_cuda:
        _kernels().pack(boxes, buffer)
        return
    for view, offset in boxes:
        _box_bytes(view, offset, buffer, view.dtype).copy_(view)


def unpack(buffer: torch.Tensor, boxes: Sequence[Box]) -> None:
    """Copy out of a buffer what `pack` wrote with the same boxes. The boxes must not overlap. Raises as `pack` does."""
    for view, offset in boxes:
        _check_box(view, offset, buffer, view.dtype)
    if buffer.is_cuda:
        _kernels().unpack(buffer, boxes)
        return
    for view, offset in boxes:
        view.copy_(_box_bytes(view, offset, buffer, view.dtype))


def pack_fp8(boxes: Sequence[Box], scaled: Sequence[BlockScales], buffer: torch.Tensor) -> None:
    """Quantise boxes (BF16, FP32) as `models.fp8.quantise` does, and write one byte per element from each box's offset
    on. Raises ValueError, before writing anything, if a box does not fit its place or its grid. scaled: one per box."""
    for (view, offset), (grid, r0, c0) in zip(boxes, scaled, strict=True):
        _check_box(view, offset, buffer, FP8)
        if view.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"weights are quantised from BF16 or FP32, not from {view.dtype}")
        if grid.dtype != torch.float32 or grid.dim() != 2 or grid.device != view.device:
            raise ValueError("scales are FP32 [block rows, block columns] on the device of the box")
        rows, columns = grid_shape((r0 + view.shape[0], c0 + view.shape[1]))
        if r0 < 0 or c0 < 0 or rows > grid.shape[0] or columns > grid.shape[1]:
            raise ValueError(f"a box of shape {list(view.shape)} at {r0}, {c0} is outside of the grid of scales")
    if buffer.is_meta:
        return
    if buffer.is_cuda:
        _kernels().pack_fp8(boxes, scaled, buffer)
        return
    for (view, offset), scales in zip(boxes, scaled, strict=True):
        _box_bytes(view, offset, buffer, FP8).copy_(quantise(view, *scales))


def pack_int4(boxes: Sequence[Box], scales: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Quantise boxes (BF16) as `models.int4.quantise` does, and write one byte per two elements from each box's offset
    on. scales: one per box, of its groups, see there. By torch's operations on every device, one box after another."""
    for (view, offset), box_scales in zip(boxes, scales, strict=True):
        packed = int4.quantise(view, box_scales)
        _check_box(packed, offset, buffer, torch.uint8)
        _box_bytes(packed, offset, buffer, torch.uint8).copy_(packed)


def device_hashes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [n] int64: `device_hash` of each of at least one tensor, all on one device.

    On CUDA one kernel launch (`megarl.reshard.run.triton_kernels`) hashes all tensors that consist of rows of adjacent
    elements, where `device_hash` takes some 30 launches per tensor. `device_hash` is the definition.
    """
    if tensors[0].is_meta:
        return tensors[0].new_empty(len(tensors), dtype=torch.int64)
    if not tensors[0].is_cuda:
        return torch.stack([device_hash(tensor) for tensor in tensors])
    hashes, remaining = _kernels().hashes(tensors)
    for number in remaining:
        hashes[number] = device_hash(tensors[number])
    return hashes


def _check_box(view: torch.Tensor, offset: int, buffer: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if a box, as `dtype`, is not copyable or does not fit its place in the buffer."""
    if view.dim() != 2 or (view.shape[1] > 1 and view.stride(1) != 1):
        raise ValueError(f"a box of shape {list(view.shape)} and strides {view.stride()} has no adjacent elements")
    stop = offset + view.numel() * dtype.itemsize
    if offset < 0 or stop > buffer.numel() or offset % dtype.itemsize:
        raise ValueError(f"bytes {offset}:{stop} of a buffer of {buffer.numel()} do not fit {dtype}")
    if view.device != buffer.device:
        raise ValueError(f"a box on {view.device} and a buffer on {buffer.device}")


def _box_bytes(view: torch.Tensor, offset: int, buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a box's bytes in the buffer, as `dtype` in the box's shape."""
    return buffer[offset : offset + view.numel() * dtype.itemsize].view(dtype).view(view.shape)


def _kernels() -> Any:
    # Import Triton only on a GPU: it needs a compiler and a driver, and is slow to import.
    from megarl.reshard.run import triton_kernels

    return triton_kernels
