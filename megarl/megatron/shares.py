"""What a rank holds of an optimizer, for a distributed checkpoint: each writes its own part, and nothing is gathered.

A data parallel rank has a run of the buffer that all parameters lie in, so of a parameter a run of its elements in
row-major order, from somewhere in the middle maybe. A checkpoint is read by boxes of a tensor, in whatever layout: a
run is a few of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from megarl.models.runs import boxes

STATES = ("param", "exp_avg", "exp_avg_sq")


def own_shares(part: Any, model_state: dict[str, Any]) -> list[ShardedTensor]:
    """This rank's masters and moments in one of Megatron's distributed optimizers, as parts of the tensors that
    `sharded_param_state_fully_reshardable` asks for when it loads. Views: they change with the next update.

    model_state: the model's sharded state.
    """
    found, _ = extract_sharded_tensors_and_factories(model_state)
    of_param = {sharded.data: sharded for sharded in nested_values(found)}
    shares: list[ShardedTensor] = []
    for buffer in part.gbuf_ranges:
        for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
            for param, ranges in bucket["param_map"].items():
                values, run = part._get_main_param_and_optimizer_states(param), ranges["param"]
                for state in STATES:
                    flat = values[state].detach().view(-1).float()
                    shares += _boxes_of(of_param[param], f"optimizer.state.{state}.", flat, run.start)
    return shares


def _boxes_of(sharded: Any, prefix: str, flat: torch.Tensor, start: int) -> Iterator[ShardedTensor]:
    """flat: the elements from `start` on of what `sharded` describes, which Megatron may store as several tensors."""
    whole = torch.empty(sharded.data.shape, dtype=flat.dtype, device="meta")
    if isinstance(sharded, ShardedTensorFactory):
        pieces = list(nested_values(replace(sharded, key=prefix + sharded.key, data=whole).build()))
    else:
        pieces = [replace(sharded, key=prefix + sharded.key, data=whole, dtype=flat.dtype)]
    memory = whole.untyped_storage()._cdata
    for piece in pieces:
        view = piece.data
        if view.untyped_storage()._cdata != memory or not view.is_contiguous():
            raise NotImplementedError(f"{sharded.key} is stored in pieces that are no runs of it")
        at = view.storage_offset()
        first, last = max(start, at), min(start + len(flat), at + view.numel())
        ahead = piece.prepend_axis_num
        # The last number says which of the data parallel ranks, of whom each has other elements here.
        others = piece.replica_id[:-1]
        for offset, sizes in boxes(view.shape, first - at, last - at) if not any(others) else ():
            here = flat[first - start : first - start + prod(sizes)]
            first += prod(sizes)
            local = (1,) * ahead + sizes
            base = piece.global_offset
            yield ShardedTensor(
                key=piece.key,
                data=here.view(local),
                dtype=here.dtype,
                local_shape=local,
                global_shape=piece.global_shape,
                global_offset=(
                    *base[:ahead],
                    *(low + more for low, more in zip(base[ahead:], offset, strict=True)),
                ),
                axis_fragmentations=None,  # no regular grid
            )
