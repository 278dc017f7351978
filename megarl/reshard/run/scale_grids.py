"""The scales of a rank's FP8 matrices.

A block may be on several ranks of the trainer. Its amax is the maximum of theirs, so that quantising a shard gives the
same bits as quantising the whole tensor and cutting it then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from megarl.models.fp8 import BLOCK, compute_scales, grid_shape, update_amax
from megarl.models.layout_algebra import Param
from megarl.reshard.plan.layout import TrainLayout

MaxReduce = Callable[[list[torch.Tensor], Sequence[int]], list[torch.Tensor]]
"""(tensors, ranks) -> the elementwise maximum, NaN where any is, of what each of these ranks, by the trainer's own
numbers, gives; all of them call it at once, with tensors of the same shapes in the same order."""

Grids = dict[tuple[str, int], torch.Tensor]
"""Scales of whole HF tensors, FP32 [ceil(R / 128), ceil(C / 128)], by name of the parameter and number of the source.
Only those of blocks that the rank has any of are meant; the others are of no use."""


def has_split_blocks(param: Param, train: TrainLayout) -> bool:
    """Whether some part of Megatron's cut has only some of a block of a parameter. The same on all ranks."""
    for part in range(train.num_shards(param.expert is not None)):
        had: dict[tuple[int, int], int] = {}  # rows or columns of each block
        for held in train.slices_of_shard(part, param):
            for block in range(held.start // BLOCK, -(-held.stop // BLOCK)):
                inside = min(held.stop, (block + 1) * BLOCK) - max(held.start, block * BLOCK)
                had[held.source, block] = had.get((held.source, block), 0) + inside
        for (source, block), count in had.items():
            if count != min(BLOCK, param.hf[source].shape[held.dim] - block * BLOCK):
                return True
    return False


def compute_scale_grids(
    local: Mapping[str, torch.Tensor], params: Iterable[Param], train: TrainLayout, rank: int, combine: MaxReduce
) -> Grids:
    """The scales of all of `params` that a rank has parts of: its quantised ones, in the order of the table.

    local: shards [rows, columns] by Megatron's name. rank: by the trainer's own numbers. combine: called at most twice,
    for dense parameters and for experts, which other ranks share, and only about those that `has_split_blocks` names, so that
    nothing is exchanged where each block is on one rank.
    """
    amax: Grids = {}
    shared: dict[bool, list[tuple[str, int]]] = {False: [], True: []}
    known: dict[object, bool] = {}  # experts are many and alike
    for param in params:
        expert = param.expert is not None
        kind = param.sharding, expert, tuple(tensor.shape for tensor in param.hf)
        if kind not in known:
            known[kind] = has_split_blocks(param, train)
        for source, tensor in enumerate(param.hf):
            key = param.megatron, source
            amax[key] = torch.zeros(grid_shape(tensor.shape), dtype=torch.float32, device=local[param.megatron].device)
            if known[kind]:
                shared[expert].append(key)
        for held in train.slices_of_rank(rank, param):
            shard = local[param.megatron].narrow(held.dim, held.offset, held.stop - held.start)
            r0, c0 = (held.start, 0) if held.dim == 0 else (0, held.start)
            update_amax(amax[param.megatron, held.source], shard, r0, c0)
    for expert, keys in shared.items():
        if keys:
            parts = train.num_shards(expert)
            first = rank - train.shard_index(rank, expert)
            combined = combine([amax[key] for key in keys], range(first, first + parts))
            amax.update(zip(keys, combined, strict=True))
    return {key: compute_scales(value) for key, value in amax.items()}
