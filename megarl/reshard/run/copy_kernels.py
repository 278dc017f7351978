"""Triton: `copies.pack`, `unpack` and `pack_fp8` in one launch, whatever the number and sizes of the boxes.

A table on the device describes the boxes, and each program does one tile: so many units of a box that all tiles cost
about the same. To which box a tile belongs, a second table says. Both go to the device in one copy.

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

from megarl.models.fp8 import FP8_MAX, MIN_AMAX
from megarl.reshard.plan.flows import BLOCK
from megarl.reshard.run.kernel_inputs import BlockScales, Box

UNITS = 1024
"""Units, of 16 bytes where all of a box's places are multiples of that, which one program copies."""
_WARPS = 8  # of a program that quantises: 64 elements of a block for each thread
_ROWS = 16  # of a block that is not copied whole, which are done at a time
_INTERPRETED = triton.knobs.runtime.interpret


def pack(boxes: Sequence[Box], buffer: torch.Tensor) -> None:
    """See copies.pack; the boxes were checked there."""
    _launch([_strided(view) + _dense(view, buffer.data_ptr() + offset) for view, offset in boxes], buffer)


def unpack(buffer: torch.Tensor, boxes: Sequence[Box]) -> None:
    """See copies.unpack; the boxes were checked there."""
    _launch([_dense(view, buffer.data_ptr() + offset) + _strided(view) for view, offset in boxes], buffer)


def _strided(view: torch.Tensor) -> tuple[int, ...]:
    """A side of a copy: address, bytes from row to row, bytes of a row, rows."""
    item = view.element_size()
    return view.data_ptr(), view.stride(0) * item, view.shape[1] * item, view.shape[0]


def _dense(view: torch.Tensor, address: int) -> tuple[int, ...]:
    row = view.shape[1] * view.element_size()
    return address, row, row, view.shape[0]


def _launch(sides: list[tuple[int, ...]], buffer: torch.Tensor) -> None:
    """Copy from the first four to the second four of each, see `_strided`."""
    jobs = np.array(sides, dtype=np.int64).reshape(-1, 8)
    jobs = jobs[(jobs[:, 2] > 0) & (jobs[:, 3] > 0)]
    if not len(jobs):
        return
    source, source_step, row, rows, target, target_step = (jobs[:, i] for i in (0, 1, 2, 3, 4, 5))
    one = (rows == 1) | ((source_step == row) & (target_step == row))  # rows that adjoin are one long row
    row, source_step, target_step = (
        np.where(one, v, w) for v, w in ((row * rows, row), (0, source_step), (0, target_step))
    )
    rows = np.where(one, 1, rows)
    # The greatest power of two up to 16 that divides all of them is their lowest bit that is set.
    every = source | target | row | source_step | target_step | 16
    unit = every & -every
    total = row * rows // unit
    if total.max() > (1 << 31) - UNITS:  # the kernel counts in 32 bits
        raise ValueError("a box of more than 2^31 units")
    table = np.stack(
        [unit, source // unit, target // unit, row // unit, total, source_step // unit, target_step // unit]
    )
    tables, tiles = _tables(table, -(-total // UNITS), buffer)
    with torch.cuda.device_of(buffer):
        _copy[(tiles,)](tables, len(jobs), UNITS=UNITS, num_warps=4)


def _tables(fields: np.ndarray, counts: np.ndarray, buffer: torch.Tensor) -> tuple[torch.Tensor, int]:
    """int64 on the device: of each box its first tile and its fields, then of each tile its box; the number of tiles.
    counts: tiles of each box."""
    first = np.cumsum(counts) - counts
    boxes = np.concatenate([first[None], fields]).T.ravel()
    tiles = np.repeat(np.arange(len(counts)), counts)
    found = torch.from_numpy(np.concatenate([boxes, tiles]))
    if buffer.is_cuda:
        found = found.pin_memory().to(buffer.device, non_blocking=True)  # the host goes on while the device copies
    return found, len(tiles)


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
    """Units of BYTES = WORDS words, from number `begin` of a box on. The compiler is told that all addresses are
    multiples of BYTES, so that it moves a unit at once."""
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
    """See copies.pack_fp8; the boxes were checked there. One launch for each type of the boxes."""
    for dtype, name in ((torch.bfloat16, tl.bfloat16), (torch.float32, tl.float32)):
        fields = [
            _quantised(view, offset, at, buffer)
            for (view, offset), at in zip(boxes, scaled, strict=True)
            if view.dtype == dtype and view.numel()
        ]
        if fields:
            table = np.array(fields, dtype=np.int64)
            tables, tiles = _tables(table[:, 1:].T, table[:, 0], buffer)
            with torch.cuda.device_of(buffer):
                constants = name, BLOCK, _ROWS, FP8_MAX, MIN_AMAX, not _INTERPRETED
                _quantise[(tiles,)](tables, len(fields), *constants, num_warps=_WARPS)


def _quantised(view: torch.Tensor, offset: int, at: BlockScales, buffer: torch.Tensor) -> tuple[int, ...]:
    top, left = at.r0 % BLOCK, at.c0 % BLOCK
    rows, columns = view.shape
    down, across = -(-(top + rows) // BLOCK), -(-(left + columns) // BLOCK)
    target = buffer.data_ptr() + offset
    step = view.stride(0)
    wide = not (view.data_ptr() % 16 or step * view.element_size() % 16 or target % 16 or columns % 16 or left % 16)
    wide = wide and max(step, columns) * BLOCK < 1 << 31  # the kernel counts in 32 bits then
    grid = at.grid[at.r0 // BLOCK :, at.c0 // BLOCK :]
    if grid.stride(1) != 1 and grid.shape[1] > 1:
        raise ValueError("the scales of a row of blocks are not adjacent")
    scales = grid.data_ptr(), grid.stride(0)
    return (
        down * across,
        view.data_ptr(),
        step,
        rows,
        columns,
        target,
        top,
        left,
        across,
        *scales,
        at.should_compute,
        wide,
    )


@triton.jit(do_not_specialize=["boxes"])
def _quantise(
    tables,
    boxes,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    MAX: tl.constexpr,
    LEAST: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """A tile is a block of the logical tensor, or what the box has of it."""
    tile = tl.program_id(0)
    field = tables + tl.load(tables + boxes * 13 + tile) * 13
    number = (tile - tl.load(field)).to(tl.int32)
    source, step = tl.load(field + 1), tl.load(field + 2)
    rows, columns, target = tl.load(field + 3), tl.load(field + 4), tl.load(field + 5)
    across = tl.load(field + 8).to(tl.int32)
    down = number // across
    right = number - down * across
    top, left = down * BLOCK - tl.load(field + 6), right * BLOCK - tl.load(field + 7)
    scale = tl.cast(tl.load(field + 9), tl.pointer_type(tl.float32)) + down * tl.load(field + 10) + right
    make = tl.load(field + 11)
    whole = (top >= 0) & (left >= 0) & (top + BLOCK <= rows) & (left + BLOCK <= columns)
    if whole & (tl.load(field + 12) != 0):
        # The compiler is told here, and only here, what is a multiple of 16 bytes, so that it moves these at once.
        row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
        begin = tl.cast(source + (top * step + left) * (TYPE.primitive_bitwidth // 8), tl.pointer_type(TYPE))
        values = tl.load(tl.multiple_of(begin, 16) + row * (step.to(tl.int32) // 8 * 8) + column)
        if make != 0:
            factor = _scale(_magnitude(values), MAX, LEAST)
            tl.store(scale, factor)
        else:
            factor = tl.load(scale)
        begin = tl.cast(target + top * columns + left, tl.pointer_type(tl.int8))
        places = tl.multiple_of(begin, 16) + row * (columns.to(tl.int32) // 16 * 16) + column
        tl.store(places, _quotient(values, factor, HARDWARE))
    else:
        # Some rows at a time, for masks and addresses of a whole block take all registers; what is read again to make
        # a scale, at the ends of tensors only, is in the cache.
        origin = tl.cast(source, tl.pointer_type(TYPE))
        if make != 0:
            most = tl.full((), 0, tl.int32)
            for first in range(0, BLOCK, ROWS):
                at, _, mask = _strip(top + first, left, rows, columns, step, ROWS, BLOCK)
                most = tl.maximum(most, _magnitude(tl.load(origin + at, mask=mask, other=0.0)))
            factor = _scale(most, MAX, LEAST)
            tl.store(scale, factor)
        else:
            factor = tl.load(scale)
        for first in range(0, BLOCK, ROWS):
            at, to, mask = _strip(top + first, left, rows, columns, step, ROWS, BLOCK)
            values = tl.load(origin + at, mask=mask, other=0.0)
            tl.store(tl.cast(target, tl.pointer_type(tl.int8)) + to, _quotient(values, factor, HARDWARE), mask=mask)


@triton.jit
def _strip(top, left, rows, columns, step, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Places of ROWS rows of a block in the box and in the buffer, and whether the box has them."""
    row, column = top + tl.arange(0, ROWS)[:, None], left + tl.arange(0, BLOCK)[None, :]
    mask = (row >= 0) & (column >= 0) & (row < rows) & (column < columns)
    return row * step + column, row * columns + column, mask


@triton.jit
def _magnitude(values):
    """The bits of the largest |FP32|: as whole numbers they are in the same order, and what is no number is above."""
    return tl.max(values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _scale(bits, MAX: tl.constexpr, LEAST: tl.constexpr):
    bits = tl.maximum(bits, tl.full((), LEAST, tl.float32).to(tl.int32, bitcast=True))
    return tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full((), MAX, tl.float32))


@triton.jit
def _quotient(values, factor, HARDWARE: tl.constexpr):
    """x * (1 / scale) as e4m3fn, as bytes: to nearest even, what is too large to the largest; NaN without its sign."""
    y = values.to(tl.float32) * tl.div_rn(tl.full((), 1.0, tl.float32), factor)
    if HARDWARE:
        code = y.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        # The interpreter's own cast does not round to nearest.
        bits = y.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
        # 2^14 has the last place of the smallest numbers, 2^-9: what is added to it is rounded to that.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(size < (121 << 23), small, normal), 0x7E) | ((bits >> 24) & 0x80)
        code = tl.where(y == y, code, 0x7F).to(tl.int8)
    return code
