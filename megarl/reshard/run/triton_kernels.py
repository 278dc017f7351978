"""Triton kernels: `pack`, `unpack`, `pack_fp8` and `device_hashes` of `copies.py` in one launch each.

A table on the device describes the boxes or tensors, and another assigns each program a tile of one of them. Under
Triton's interpreter (TRITON_INTERPRET=1 before the import) the same code runs on CPU tensors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Kernel arguments have Triton types, not Python types.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megarl.models.fp8 import BLOCK
from megarl.reshard.run import checksum
from megarl.reshard.run.scale_grids import BlockScales

Box = tuple[torch.Tensor, int]  # (view, offset), see `copies.Box`
UNITS = 1024
"""Units per program. A unit is 16 bytes if all addresses and strides of the box are multiples of that, else a
smaller power of two."""
_WARPS = 8  # per quantising program: 64 elements of a block per thread
_ROWS = 16  # rows at a time, for a block that is not whole
_INTERPRETED = triton.knobs.runtime.interpret


def pack(boxes: Sequence[Box], buffer: torch.Tensor) -> None:
    """See copies.pack, which has checked the boxes."""
    _launch([_strided(view) + _dense(view, buffer.data_ptr() + offset) for view, offset in boxes], buffer)


def unpack(buffer: torch.Tensor, boxes: Sequence[Box]) -> None:
    """See copies.unpack, which has checked the boxes."""
    _launch([_dense(view, buffer.data_ptr() + offset) + _strided(view) for view, offset in boxes], buffer)


def _strided(view: torch.Tensor) -> tuple[int, ...]:
    """Return one side of a copy: address, bytes from row to row, bytes per row, rows."""
    item = view.element_size()
    return view.data_ptr(), view.stride(0) * item, view.shape[1] * item, view.shape[0]


def _dense(view: torch.Tensor, address: int) -> tuple[int, ...]:
    row = view.shape[1] * view.element_size()
    return address, row, row, view.shape[0]


def _launch(sides: list[tuple[int, ...]], buffer: torch.Tensor) -> None:
    """Copy from the first four to the second four fields of each entry, see `_strided`."""
    jobs = np.array(sides, dtype=np.int64).reshape(-1, 8)
    jobs = jobs[(jobs[:, 2] > 0) & (jobs[:, 3] > 0)]
    if not len(jobs):
        return
    source, source_step, row, rows, target, target_step = jobs[:, :6].T
    is_contiguous = (rows == 1) | ((source_step == row) & (target_step == row))  # adjacent rows are one long row
    row, source_step, target_step = (
        np.where(is_contiguous, v, w) for v, w in ((row * rows, row), (0, source_step), (0, target_step))
    )
    rows = np.where(is_contiguous, 1, rows)
    # The largest power of two up to 16 that divides all of them is their lowest set bit.
    combined = source | target | row | source_step | target_step | 16
    unit = combined & -combined
    total = row * rows // unit
    if total.max() > (1 << 31) - UNITS:  # the kernel uses 32-bit indices
        raise ValueError("a box of more than 2^31 units")
    table = np.stack(
        [unit, source // unit, target // unit, row // unit, total, source_step // unit, target_step // unit]
    )
    tables, tiles = _tables(table, -(-total // UNITS), buffer)
    with torch.cuda.device_of(buffer):
        _copy[(tiles,)](tables, len(jobs), UNITS=UNITS, num_warps=4)


def _tables(fields: np.ndarray, counts: np.ndarray, buffer: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return an int64 tensor on the device, of each box's first tile and fields and then each tile's box, and the
    number of tiles. counts: tiles per box."""
    first_tile = np.cumsum(counts) - counts
    tables = torch.from_numpy(np.concatenate([np.concatenate([first_tile[None], fields]).T.ravel(), counts]))
    if buffer.is_cuda:
        tables = tables.pin_memory().to(buffer.device, non_blocking=True)  # asynchronous
    # The device lists the tiles: there is one per 16 KiB, which would cost the host more than the copy itself.
    tiles, numbers = int(counts.sum()), torch.arange(len(counts), device=buffer.device)
    box_of_tile = torch.repeat_interleave(numbers, tables[-len(counts) :], output_size=tiles)
    return torch.cat([tables[: -len(counts)], box_of_tile]), tiles


@triton.jit(do_not_specialize=["boxes"])
def _copy(tables, boxes, UNITS: tl.constexpr):
    tile = tl.program_id(0)
    field = tables + tl.load(tables + boxes * 8 + tile) * 8
    begin = ((tile - tl.load(field)) * UNITS).to(tl.int32)
    unit = tl.load(field + 1)
    if unit == 16:
        _move(field, begin, tl.int32, 4, 16, UNITS)
    elif unit == 8:
        _move(field, begin, tl.int32, 2, 8, UNITS)
    elif unit == 4:
        _move(field, begin, tl.int32, 1, 4, UNITS)
    elif unit == 2:
        _move(field, begin, tl.int16, 1, 2, UNITS)
    else:
        _move(field, begin, tl.int8, 1, 1, UNITS)


@triton.jit
def _move(field, begin, WORD: tl.constexpr, WORDS: tl.constexpr, BYTES: tl.constexpr, UNITS: tl.constexpr):
    """Copy units of BYTES = WORDS words, starting at unit `begin` of a box. The hints that all addresses are
    multiples of BYTES let the compiler move a unit at once."""
    source, target = tl.load(field + 2), tl.load(field + 3)
    columns, total = tl.load(field + 4).to(tl.int32), tl.load(field + 5).to(tl.int32)
    unit = begin + tl.arange(0, UNITS)
    row = unit // columns
    column = unit - row * columns
    source = tl.cast((source + row * tl.load(field + 6) + column) * BYTES, tl.pointer_type(WORD))[:, None]
    target = tl.cast((target + row * tl.load(field + 7) + column) * BYTES, tl.pointer_type(WORD))[:, None]
    word = tl.arange(0, WORDS)[None, :]
    mask = (unit < total)[:, None]
    values = tl.load(tl.multiple_of(source, [BYTES, BYTES]) + word, mask=mask)
    tl.store(tl.multiple_of(target, [BYTES, BYTES]) + word, values, mask=mask)


def pack_fp8(boxes: Sequence[Box], scaled: Sequence[BlockScales], buffer: torch.Tensor) -> None:
    """See copies.pack_fp8, which has checked the boxes. One launch per dtype of the boxes."""
    for dtype, name in ((torch.bfloat16, tl.bfloat16), (torch.float32, tl.float32)):
        fields = [
            _quantised(view, offset, scales, buffer)
            for (view, offset), scales in zip(boxes, scaled, strict=True)
            if view.dtype == dtype and view.numel()
        ]
        if fields:
            table = np.array(fields, dtype=np.int64)
            tables, tiles = _tables(table[:, 1:].T, table[:, 0], buffer)
            with torch.cuda.device_of(buffer):
                constants = name, BLOCK, _ROWS, not _INTERPRETED
                _quantise[(tiles,)](tables, len(fields), *constants, num_warps=_WARPS)


def _quantised(view: torch.Tensor, offset: int, scales: BlockScales, buffer: torch.Tensor) -> tuple[int, ...]:
    top, left = scales.r0 % BLOCK, scales.c0 % BLOCK
    rows, columns = view.shape
    down, across = -(-(top + rows) // BLOCK), -(-(left + columns) // BLOCK)
    target = buffer.data_ptr() + offset
    row_stride = view.stride(0)
    is_aligned = not any(n % 16 for n in (view.data_ptr(), row_stride * view.element_size(), target, columns, left))
    is_aligned = is_aligned and max(row_stride, columns) * BLOCK < 1 << 31  # that path uses 32-bit indices
    grid = scales.grid[scales.r0 // BLOCK :, scales.c0 // BLOCK :]
    if grid.stride(1) != 1 and grid.shape[1] > 1:
        raise ValueError("the scales of a row of blocks are not adjacent")
    geometry = view.data_ptr(), row_stride, rows, columns, target, top, left, across
    return down * across, *geometry, grid.data_ptr(), grid.stride(0), is_aligned


@triton.jit(do_not_specialize=["boxes"])
def _quantise(tables, boxes, TYPE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr):
    """Quantise one tile: a block of the logical tensor, or the part of it that the box has."""
    tile = tl.program_id(0)
    field = tables + tl.load(tables + boxes * 12 + tile) * 12
    number = (tile - tl.load(field)).to(tl.int32)
    source, step = tl.load(field + 1), tl.load(field + 2)
    rows, columns, target = tl.load(field + 3), tl.load(field + 4), tl.load(field + 5)
    across = tl.load(field + 8).to(tl.int32)
    down = number // across
    right = number - down * across
    top, left = down * BLOCK - tl.load(field + 6), right * BLOCK - tl.load(field + 7)
    scales = tl.cast(tl.load(field + 9), tl.pointer_type(tl.float32))
    scale = tl.load(scales + down * tl.load(field + 10) + right)
    is_whole = (top >= 0) & (left >= 0) & (top + BLOCK <= rows) & (left + BLOCK <= columns)
    if is_whole & (tl.load(field + 11) != 0):
        # Only this branch hints multiples of 16 bytes to the compiler, so that it moves 16 bytes at once.
        row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
        begin = tl.cast(source + (top * step + left) * (TYPE.primitive_bitwidth // 8), tl.pointer_type(TYPE))
        values = tl.load(tl.multiple_of(begin, 16) + row * (step.to(tl.int32) // 8 * 8) + column)
        begin = tl.cast(target + top * columns + left, tl.pointer_type(tl.int8))
        places = tl.multiple_of(begin, 16) + row * (columns.to(tl.int32) // 16 * 16) + column
        tl.store(places, _quotient(values, scale, HARDWARE))
    else:
        # A few rows at a time: masks and addresses of a whole block would take all registers.
        origin, output = tl.cast(source, tl.pointer_type(TYPE)), tl.cast(target, tl.pointer_type(tl.int8))
        for first in range(0, BLOCK, ROWS):
            row = top + first + tl.arange(0, ROWS)[:, None]
            column = left + tl.arange(0, BLOCK)[None, :]
            mask = (row >= 0) & (column >= 0) & (row < rows) & (column < columns)
            values = tl.load(origin + row * step + column, mask=mask, other=0.0)
            tl.store(output + row * columns + column, _quotient(values, scale, HARDWARE), mask=mask)


@triton.jit
def _quotient(values, scale, HARDWARE: tl.constexpr):
    """Return x * (1 / scale) as e4m3fn bytes: round to nearest even, saturate, drop the sign of NaN."""
    y = values.to(tl.float32) * tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    if HARDWARE:
        code = y.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        # The interpreter's own cast does not round to nearest.
        bits = y.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
        # The last place of 2^14 is 2^-9, that of the smallest numbers, so adding 2^14 rounds to it.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(size < (121 << 23), small, normal), 0x7E) | ((bits >> 24) & 0x80)
        code = tl.where(y == y, code, 0x7F).to(tl.int8)
    return code


WORDS = 4096
"""8-byte words per program."""
_AT_ONCE = 1024
STEP = tl.constexpr(checksum.STEP)
FIRST, SECOND = (tl.constexpr(factor) for _, factor in checksum.MIX)  # after shifts by 30 and 27
_FIELDS = 7  # per table row, including the first tile


def hashes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Return [n] int64, see `copies.device_hashes`, and the indices of the tensors that are not rows of adjacent
    elements. The hashes of these are left 0."""
    rows = list(map(_rows, tensors))
    fields = [(index, *fields) for index, fields in enumerate(rows) if fields is not None]
    unsupported = [index for index, fields in enumerate(rows) if fields is None]
    result = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    if not fields:
        return result, unsupported
    table = np.array(fields, dtype=np.int64)
    words = np.maximum(1, -(-table[:, 4] // 8))  # an empty tensor still adds its length
    tables, tiles = _tables(table.T, -(-words // WORDS), result)
    with torch.cuda.device_of(result):
        _hash[(tiles,)](tables, len(fields), result, WORDS=WORDS, AT_ONCE=_AT_ONCE, FIELDS=_FIELDS, num_warps=4)
    return result, unsupported


def _rows(tensor: torch.Tensor) -> tuple[int, int, int, int, int] | None:
    """Return address, bytes per row, bytes from row to row, total bytes, and whether all but the total are multiples of
    8; None if the tensor does not consist of rows of adjacent elements."""
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
                # Another name than above: Triton wants one type for what both branches assign.
                bytes_ = tl.cast(address + line * step + (byte_offset - line * row), tl.pointer_type(tl.uint8))
                word |= tl.load(bytes_, mask=byte_offset < total, other=0).to(tl.int64) << (8 * byte)
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
