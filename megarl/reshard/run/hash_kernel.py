"""Triton kernel: `checksum.device_hash` of many tensors in one launch, whatever their number and sizes.

A table on the device describes the tensors, and each program hashes a fixed number of words of one of them, see
`copy_kernels.py`. The hash is a sum modulo 2^64, so programs may add their parts in any order.

Under Triton's interpreter (TRITON_INTERPRET=1 before the import) the same code runs on CPU tensors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Kernel arguments have Triton types, not Python types.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megarl.reshard.run.copy_kernels import _tables
from megarl.reshard.run.kernel_inputs import MIX
from megarl.reshard.run.kernel_inputs import STEP as _STEP

WORDS = 4096
"""8-byte words per program."""
_AT_ONCE = 1024
STEP = tl.constexpr(_STEP)
FIRST, SECOND = (tl.constexpr(factor) for _, factor in MIX)  # after shifts by 30 and 27
_FIELDS = 7  # per table row, including the first tile


def hashes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Return [n] int64, see `checksum.device_hashes`, and the indices of the tensors that are not rows of adjacent
    elements. The hashes of these are left 0."""
    unsupported: list[int] = []
    result = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    fields: list[tuple[int, ...]] = []
    for index, tensor in enumerate(tensors):
        rows = _rows(tensor)
        if rows is None:
            unsupported.append(index)
        else:
            fields.append((index, *rows))
    if not fields:
        return result, unsupported
    table = np.array(fields, dtype=np.int64)
    words = np.maximum(1, -(-table[:, 4] // 8))  # an empty tensor still adds its length
    tables, tiles = _tables(table.T, -(-words // WORDS), result)
    with torch.cuda.device_of(result):
        _hash[(tiles,)](tables, len(fields), result, WORDS=WORDS, AT_ONCE=_AT_ONCE, FIELDS=_FIELDS, num_warps=4)
    return result, unsupported


def _rows(tensor: torch.Tensor) -> tuple[int, int, int, int, int] | None:
    """Return address, bytes per row, bytes from row to row, total bytes, and whether all of these are multiples of 8.

    None if the tensor does not consist of rows of adjacent elements.
    """
    item, total = tensor.element_size(), tensor.numel() * tensor.element_size()
    if tensor.is_contiguous():
        row = step = total
    elif tensor.dim() == 2 and (tensor.shape[1] == 1 or tensor.stride(1) == 1):
        row, step = tensor.shape[1] * item, tensor.stride(0) * item
    else:
        return None
    address = tensor.data_ptr()
    return address, row, step, total, int(not (address % 8 or row % 8 or step % 8))


@triton.jit(do_not_specialize=["boxes"])
def _hash(tables, boxes, output, WORDS: tl.constexpr, AT_ONCE: tl.constexpr, FIELDS: tl.constexpr):
    tile = tl.program_id(0)
    field = tables + tl.load(tables + boxes * FIELDS + tile) * FIELDS
    first = (tile - tl.load(field)) * WORDS
    address, row, step = tl.load(field + 2), tl.load(field + 3), tl.load(field + 4)
    total = tl.load(field + 5)
    aligned = tl.load(field + 6)
    total_hash = tl.zeros((), tl.int64)
    for begin in range(0, WORDS, AT_ONCE):
        position = first + begin + tl.arange(0, AT_ONCE).to(tl.int64)
        in_range = position * 8 < total
        if aligned != 0:
            byte_offset = position * 8
            line = byte_offset // tl.maximum(row, 1)
            places = tl.cast(address + line * step + (byte_offset - line * row), tl.pointer_type(tl.int64))
            word = tl.load(places, mask=in_range, other=0)
        else:  # words may be unaligned and may span rows
            word = tl.zeros((AT_ONCE,), tl.int64)
            for byte in tl.static_range(8):
                byte_offset = position * 8 + byte
                line = byte_offset // tl.maximum(row, 1)
                places = tl.cast(address + line * step + (byte_offset - line * row), tl.pointer_type(tl.uint8))
                word |= tl.load(places, mask=byte_offset < total, other=0).to(tl.int64) << (8 * byte)
        mixed = _mixed(word + (position + 1) * STEP)
        total_hash += tl.sum(tl.where(in_range, mixed, 0))
    if first == 0:
        total_hash += _mixed(total)
    tl.atomic_add(output + tl.load(field + 1), total_hash)


@triton.jit
def _mixed(z):
    """splitmix64's finaliser, with unsigned shifts."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * FIRST
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * SECOND
    return z ^ ((z >> 31) & 0x1FFFFFFFF)
