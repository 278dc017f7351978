"""Compute the scales of a rank's FP8 and INT4 matrices.

Trainer ranks that share a block of FP8 take the maximum of their amax, so that quantising a shard gives the same bits
as quantising the whole tensor. No ranks share a group of INT4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from megarl.models import int4
from megarl.models.fp8 import BLOCK, compute_scales, grid_shape, update_amax
from megarl.models.layout_algebra import Param
from megarl.reshard.plan.layout import TrainLayout, planes

MaxReduce = Callable[[list[torch.Tensor], Sequence[int]], list[torch.Tensor]]
"""(tensors, ranks) -> the elementwise maximum over these trainer ranks, NaN where any is NaN. All of the ranks call
it together, with tensors of the same shapes in the same order."""

Grids = dict[tuple[str, int], torch.Tensor]
"""Scales of whole HF tensors, FP32 [ceil(R / 128), ceil(C / 128)] or, for INT4, bfloat16 [R, C / 32], by parameter name
and source number. Only entries of blocks that the rank holds part of are valid."""


class BlockScales(NamedTuple):
    """FP32 scales of a whole logical tensor, [ceil(R / 128), ceil(C / 128)], and the position of a box's first element
    in that tensor."""

    grid: torch.Tensor
    r0: int
    c0: int


def has_split_blocks(param: Param, train: TrainLayout) -> bool:
    """Return whether any shard of Megatron's layout holds only part of a block. The same on all ranks."""
    for part in range(train.num_shards(param.expert is not None)):
        counts: dict[tuple[int, int], int] = {}  # (source, block) -> rows or columns in this shard
        for interval in train.slices_of_shard(part, param):
            for block in range(interval.start // BLOCK, -(-interval.stop // BLOCK)):
                overlap = min(interval.stop, (block + 1) * BLOCK) - max(interval.start, block * BLOCK)
                counts[interval.source, block] = counts.get((interval.source, block), 0) + overlap
        for (source, block), count in counts.items():
            if count != min(BLOCK, param.hf[source].shape[interval.dim] - block * BLOCK):
                return True
    return False


def shared_grids(params: Iterable[Param], train: TrainLayout) -> dict[bool, dict[tuple[str, int], tuple[int, int]]]:
    """Return the shapes of the grids that ranks compute together: of dense parameters (False) and of experts (True), in
    the order of the table."""
    shared: dict[bool, dict[tuple[str, int], tuple[int, int]]] = {False: {}, True: {}}
    is_split: dict[object, bool] = {}  # cached by kind: experts are many and alike
    for param in params:
        expert = param.expert is not None
        kind = param.sharding, expert, tuple(tensor.shape for tensor in param.hf)
        if kind not in is_split:
            is_split[kind] = has_split_blocks(param, train)
        if is_split[kind]:
            shared[expert] |= {
                (param.megatron, source): grid_shape(tensor.shape) for source, tensor in enumerate(param.hf)
            }
    return shared


def shard_ranks(train: TrainLayout, rank: int, expert: bool) -> range:
    """Return the trainer ranks that have the other shards of the same parameters as a trainer rank, and itself."""
    first_rank = rank - train.shard_index(rank, expert)
    return range(first_rank, first_rank + train.num_shards(expert))


def compute_scale_grids(
    local: Mapping[str, torch.Tensor], params: Iterable[Param], train: TrainLayout, rank: int, reduce_max: MaxReduce
) -> Grids:
    """Compute the scales of all of `params` that a rank holds parts of: its quantised ones, in the order of the table.

    local: shards [rows, columns] by Megatron name. rank: the trainer's numbering. reduce_max: called at most once for
    dense parameters and once for experts, with those that `has_split_blocks` selects.
    """
    amax: Grids = {}
    params = list(params)
    for param in params:
        for source, tensor in enumerate(param.hf):
            key = param.megatron, source
            amax[key] = torch.zeros(grid_shape(tensor.shape), dtype=torch.float32, device=local[param.megatron].device)
        for interval in train.slices_of_rank(rank, param):
            shard = local[param.megatron].narrow(interval.dim, interval.offset, interval.stop - interval.start)
            r0, c0 = (interval.start, 0) if interval.dim == 0 else (0, interval.start)
            update_amax(amax[param.megatron, interval.source], shard, r0, c0)
    for expert, shapes in shared_grids(params, train).items():
        if shapes:
            combined = reduce_max([amax[key] for key in shapes], shard_ranks(train, rank, expert))
            amax.update(zip(shapes, combined, strict=True))
    return {key: compute_scales(value) for key, value in amax.items()}


def compute_int4_scales(
    local: Mapping[str, torch.Tensor], params: Iterable[Param], train: TrainLayout, rank: int
) -> Grids:
    """Compute the INT4 scales of all of `params`, which this rank alone holds parts of. Arguments as above."""
    grids: Grids = {}
    for param in params:
        scale_plane = planes(param, "int4")[1]
        shard = local[param.megatron]
        for source, tensor in enumerate(param.hf):
            shape = scale_plane.shape(*tensor.shape)
            grids[param.megatron, source] = torch.zeros(shape, dtype=torch.bfloat16, device=shard.device)
        for interval in train.slices_of_rank(rank, param):
            part = shard.narrow(interval.dim, interval.offset, interval.stop - interval.start)
            _, dim, start, stop, _ = scale_plane.scale(interval)
            grids[param.megatron, interval.source].narrow(dim, start, stop - start).copy_(int4.compute_scales(part))
    return grids
