"""Matrices as FP8 in blocks of 128 x 128 with a scale each: what an engine with an FP8 checkpoint holds.

The definition, for a block x (BF16 or FP32) of the logical tensor, the last ones of a row or column being smaller:

    scale = max(amax |x|, 1e-4) / 448        FP32, correctly rounded; the checkpoint's `weight_scale_inv`
    q = e4m3fn(x * (1 / scale))              1 / scale and the product are rounded to FP32, the cast to nearest even

That is `per_block_cast_to_fp8` of DeepGEMM (deep_gemm/utils/math.py) without UE8M0, bit for bit. SGLang makes no such
blocks as it loads: it takes them from a checkpoint. Where it does cast a BF16 weight by itself it uses this function
(models/dots3_common, and with the scales rounded up to powers of two its own copy in quantization/fp8_utils.py), and
its DeepSeek kernels are DeepGEMM's. Other converters divide x / scale, or do not bound amax, by which a block of zeros
becomes NaN; their last bits differ. An amax that is NaN makes its whole block NaN, an infinite one zeros and NaN.
The sign of a NaN is the device's.

A block may be on several ranks of the trainer. Its amax is the maximum of theirs, so that quantising a shard gives the
same bits as quantising the whole tensor and cutting it then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from megarl.models.cuts import Param
from megarl.models.fp8 import BLOCK, grid_shape
from megarl.reshard.layout import TrainLayout

FP8 = torch.float8_e4m3fn
MAX = 448.0
"""The largest number of e4m3fn."""
LEAST = 1e-4
"""The least amax that a scale is made from."""
_AT_ONCE = 1 << 22  # elements, which bounds the temporary memory

Combine = Callable[[list[torch.Tensor], Sequence[int]], list[torch.Tensor]]
"""(tensors, ranks) -> the elementwise maximum, NaN where any is, of what each of these ranks, by the trainer's own
numbers, gives; all of them call it at once, with tensors of the same shapes in the same order."""

Grids = dict[tuple[str, int], torch.Tensor]
"""Scales of whole HF tensors, FP32 [ceil(R / 128), ceil(C / 128)], by name of the parameter and number of the source.
Only those of blocks that the rank has any of are meant; the others are of no use."""


def block_amax(weight: torch.Tensor, r0: int, c0: int, grid_shape: Sequence[int]) -> torch.Tensor:
    """[*grid_shape] FP32: the largest |element| of each logical block that is in a shard `weight` [rows, columns] whose
    first element is at row r0 and column c0 of the logical tensor; 0 for blocks that it has nothing of, NaN where it
    has any. Raises ValueError where the shard is not inside of the grid, or not BF16 or FP32.
    """
    grid = torch.zeros(*grid_shape, dtype=torch.float32, device=weight.device)
    if weight.numel():
        _raise_to(grid, weight, r0, c0)
    return grid


def _raise_to(grid: torch.Tensor, weight: torch.Tensor, r0: int, c0: int) -> None:
    """Make each element of a grid of maxima at least the shard's."""
    inside = _blocks(weight, r0, c0, grid)
    top, left = r0 % BLOCK, c0 % BLOCK
    size = weight.abs()
    bottom, right = -(top + len(weight)) % BLOCK, -(left + weight.shape[1]) % BLOCK
    if top or bottom or left or right:
        size = torch.nn.functional.pad(size, (left, right, top, bottom))
    rows, columns = (n // BLOCK for n in size.shape)
    found = size.view(rows, BLOCK, columns, BLOCK).amax(dim=3).amax(dim=1).float()
    grid[inside] = torch.maximum(grid[inside], found)


def _blocks(weight: torch.Tensor, r0: int, c0: int, grid: torch.Tensor) -> tuple[slice, slice]:
    """The blocks that a shard is in."""
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"weights are quantised from BF16 or FP32, not from {weight.dtype}")
    rows, columns = grid_shape((r0 + weight.shape[0], c0 + weight.shape[1]))
    if r0 < 0 or c0 < 0 or rows > grid.shape[0] or columns > grid.shape[1]:
        raise ValueError(
            f"rows {r0}:{r0 + weight.shape[0]}, columns {c0}:{c0 + weight.shape[1]} need {rows} x {columns} blocks, "
            f"the grid has {' x '.join(map(str, grid.shape))}"
        )
    return slice(r0 // BLOCK, rows), slice(c0 // BLOCK, columns)


def scales(amax: torch.Tensor) -> torch.Tensor:
    """FP32, the same shape: the scale of each block, from its amax."""
    # By a tensor, for by a number CUDA multiplies with its reciprocal, and that rounds otherwise.
    return amax.clamp(min=LEAST) / torch.full_like(amax, MAX)


def quantise(weight: torch.Tensor, scales: torch.Tensor, r0: int, c0: int) -> torch.Tensor:
    """[rows, columns] e4m3fn of any box `weight` (BF16, FP32) of a logical tensor, whose first element is at row r0 and
    column c0. scales: of the whole tensor. Raises ValueError where the box is not inside of the grid, or another type.
    """
    factors = 1.0 / scales[_blocks(weight, r0, c0, scales)]
    quantised = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    step = max(1, _AT_ONCE // max(1, weight.shape[1]))
    for first in range(0, len(weight), step):
        part = weight[first : first + step]
        quantised[first : first + step] = part * _spread(factors, part, r0 % BLOCK + first, c0 % BLOCK)
    return quantised


def dequantise(
    quantised: torch.Tensor, scales: torch.Tensor, r0: int = 0, c0: int = 0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[rows, columns]: `quantise` undone, as SGLang's `block_quant_dequant` does: the product in FP32, then `dtype`."""
    rows, columns = grid_shape((r0 + len(quantised), c0 + quantised.shape[1]))
    inside = scales[r0 // BLOCK : rows, c0 // BLOCK : columns]
    return (quantised.float() * _spread(inside, quantised, r0 % BLOCK, c0 % BLOCK)).to(dtype)


def _spread(values: torch.Tensor, box: torch.Tensor, top: int, left: int) -> torch.Tensor:
    """The value of each element's block, in the box's shape, which begins in row `top` and column `left` of the blocks
    that `values` are of."""
    rows = torch.arange(top, top + box.shape[0], device=box.device) // BLOCK
    columns = torch.arange(left, left + box.shape[1], device=box.device) // BLOCK
    return values[rows][:, columns]


def straddles(param: Param, train: TrainLayout) -> bool:
    """Whether some part of Megatron's cut has only some of a block of a parameter. The same on all ranks."""
    for part in range(train.cut(param.expert is not None)):
        had: dict[tuple[int, int], int] = {}  # rows or columns of each block
        for held in train.held_by(part, param):
            for block in range(held.start // BLOCK, -(-held.stop // BLOCK)):
                inside = min(held.stop, (block + 1) * BLOCK) - max(held.start, block * BLOCK)
                had[held.source, block] = had.get((held.source, block), 0) + inside
        for (source, block), count in had.items():
            if count != min(BLOCK, param.hf[source].shape[held.dim] - block * BLOCK):
                return True
    return False


def scale_grids(
    local: Mapping[str, torch.Tensor], params: Iterable[Param], train: TrainLayout, rank: int, combine: Combine
) -> Grids:
    """The scales of all of `params` that a rank has parts of: its quantised ones, in the order of the table.

    local: shards [rows, columns] by Megatron's name. rank: by the trainer's own numbers. combine: called at most twice,
    for dense parameters and for experts, which other ranks share, and only about those that `straddles` names, so that
    nothing is exchanged where each block is on one rank.
    """
    amax: Grids = {}
    shared: dict[bool, list[tuple[str, int]]] = {False: [], True: []}
    known: dict[object, bool] = {}  # experts are many and alike
    for param in params:
        expert = param.expert is not None
        kind = param.cut, expert, tuple(tensor.shape for tensor in param.hf)
        if kind not in known:
            known[kind] = straddles(param, train)
        for source, tensor in enumerate(param.hf):
            key = param.megatron, source
            amax[key] = torch.zeros(grid_shape(tensor.shape), dtype=torch.float32, device=local[param.megatron].device)
            if known[kind]:
                shared[expert].append(key)
        for held in train.held(rank, param):
            shard = local[param.megatron].narrow(held.dim, held.offset, held.stop - held.start)
            r0, c0 = (held.start, 0) if held.dim == 0 else (0, held.start)
            _raise_to(amax[param.megatron, held.source], shard, r0, c0)
    for expert, keys in shared.items():
        if keys:
            parts = train.cut(expert)
            first = rank - train.part(rank, expert)
            combined = combine([amax[key] for key in keys], range(first, first + parts))
            amax.update(zip(keys, combined, strict=True))
    return {key: scales(value) for key, value in amax.items()}
