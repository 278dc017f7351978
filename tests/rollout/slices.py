"""Orders to write full HF tensors into an engine, made by the layout algebra alone: no trainer takes part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megarl.models.layout import Param
from megarl.reshard.checksum import slice_hash
from megarl.reshard.layout import EngineLayout


def write_order(
    params: Sequence[Param],
    engine: EngineLayout,
    position: int,
    tensors: Mapping[str, torch.Tensor],
    held: Mapping[str, Sequence[Any]],
    num_experts: int,
) -> tuple[dict[str, Any], torch.Tensor]:
    """One order, and its bucket, with all that the engine's rank `position` has of these parameters.

    tensors: HF tensors by name, of any dtype; held: what "describe" says of the rank, by name [dtype, shape].
    """
    slices: list[list[Any]] = []
    parts: list[torch.Tensor] = []
    at = 0

    def add(part: torch.Tensor) -> int:
        nonlocal at
        data = part.contiguous().view(-1).view(torch.uint8)
        start, at = at, at + -(-data.numel() // 16) * 16
        parts.extend((data, data.new_zeros(at - start - data.numel())))
        return start

    dtypes = {}
    for param in params:
        slot = engine.slot(param)
        assert slot is not None
        dtypes[slot.name] = held[slot.name][0]
        for index in engine.indices(position, param, num_experts):
            for source, dim, start, stop, offset in engine.held(position, param):
                box = tensors[param.hf[source].name].narrow(dim, start, stop - start)
                box = box.to(getattr(torch, dtypes[slot.name]))
                r0, c0 = (offset, 0) if dim == 0 else (0, offset)
                r1, c1 = r0 + box.shape[0], c0 + (box.shape[1] if box.dim() == 2 else 1)
                where = add(box), add(torch.tensor([slice_hash(box)]))
                stacked = index if slot.grid == "expert" else -1
                slices.append([slot.name, stacked, r0, r1, c0, c1, *where])
    return {"do": "write", "version": 1, "tensor_dtype": dtypes, "slices": slices}, torch.cat(parts)
