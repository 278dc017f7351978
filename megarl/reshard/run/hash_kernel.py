"""Triton: `checksum.device_hash` of many tensors in one launch, whatever their number and sizes.

A table on the device describes the tensors, and each program does so many words of one of them, see
`copy_kernels.py`. The hash is a sum modulo 2^64, so the programs may add their parts up in any order.

Under Triton's interpreter (TRITON_INTERPRET=1 before the import) the same runs on CPU tensors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of kernels have types of Triton, not of Python.

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
"""Words of 8 bytes that one program does."""
_AT_ONCE = 1024
STEP = tl.constexpr(_STEP)
FIRST, SECOND = (tl.constexpr(factor) for _, factor in MIX)  # after shifts by 30 and 27
_FIELDS = 7  # of a row of the table, with its first tile


def hashes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """[n] int64: see `checksum.device_hashes`; and the numbers of those that are not rows of adjacent elements, whose
    places are left 0."""
    left: list[int] = []
    found = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    fields: list[tuple[int, ...]] = []
    for number, tensor in enumerate(tensors):
        rows = _rows(tensor)
        if rows is None:
            left.append(number)
        else:
            fields.append((number, *rows))
    if not fields:
        return found, left
    table = np.array(fields, dtype=np.int64)
    words = np.maximum(1, -(-table[:, 4] // 8))  # one without bytes has its length to add
    tables, tiles = _tables(table.T, -(-words // WORDS), found)
    with torch.cuda.device_of(found):
        _hash[(tiles,)](tables, len(fields), found, WORDS=WORDS, AT_ONCE=_AT_ONCE, FIELDS=_FIELDS, num_warps=4)
    return found, left


def _rows(tensor: torch.Tensor) -> tuple[int, int, int, int, int] | None:
    """Address, bytes of a row, bytes from row to row, bytes in all, and whether all of these are multiples of 8; None
    where a tensor is not rows of adjacent elements."""
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
def _hash(tables, boxes, found, WORDS: tl.constexpr, AT_ONCE: tl.constexpr, FIELDS: tl.constexpr):
    tile = tl.program_id(0)
    field = tables + tl.load(tables + boxes * FIELDS + tile) * FIELDS
    first = (tile - tl.load(field)) * WORDS
    address, row, step = tl.load(field + 2), tl.load(field + 3), tl.load(field + 4)
    total = tl.load(field + 5)
    aligned = tl.load(field + 6)
    whole = tl.zeros((), tl.int64)
    for begin in range(0, WORDS, AT_ONCE):
        position = first + begin + tl.arange(0, AT_ONCE).to(tl.int64)
        there = position * 8 < total
        if aligned != 0:
            at = position * 8
            line = at // tl.maximum(row, 1)
            places = tl.cast(address + line * step + (at - line * row), tl.pointer_type(tl.int64))
            word = tl.load(places, mask=there, other=0)
        else:  # a word may lie across rows, and anywhere
            word = tl.zeros((AT_ONCE,), tl.int64)
            for byte in tl.static_range(8):
                at = position * 8 + byte
                line = at // tl.maximum(row, 1)
                places = tl.cast(address + line * step + (at - line * row), tl.pointer_type(tl.uint8))
                word |= tl.load(places, mask=at < total, other=0).to(tl.int64) << (8 * byte)
        mixed = _mixed(word + (position + 1) * STEP)
        whole += tl.sum(tl.where(there, mixed, 0))
    if first == 0:
        whole += _mixed(total)
    tl.atomic_add(found + tl.load(field + 1), whole)


@triton.jit
def _mixed(z):
    """splitmix64's finaliser; the shifts are of unsigned numbers."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * FIRST
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * SECOND
    return z ^ ((z >> 31) & 0x1FFFFFFFF)
