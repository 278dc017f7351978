"""Orders to write full HF tensors into an engine, made by the layout algebra alone: no trainer takes part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny_models
import torch
from compare import assert_equals
from engines import Running
from safetensors.torch import load_file
from transformers import PreTrainedModel

from megarl.engine.sglang_engine import Engine, allocate
from megarl.engine.weight_sender import OrderBuffer
from megarl.models.layout_algebra import Param
from megarl.models.registry import family_of, load_hf_config
from megarl.reshard.plan.layout import EngineLayout, engine_shapes
from megarl.reshard.run.checksum import device_hash


def check_orders(running: Running, layout: EngineLayout, new: PreTrainedModel, folder: Path) -> None:
    """An engine that was given other weights by orders generates as `transformers` does with these."""
    overwrite(running.engine, layout, tiny_models.save(new, folder / "ordered"), 7)
    assert_equals(running.engine, new, 7)


def overwrite(engine: Engine, layout: EngineLayout, folder: Path, version: int) -> None:
    """Replace all of an engine's weights by those of an HF folder, those of its draft model if `layout` has one, too.
    Its tensors are those of the table, no more."""
    hf, tensors = load_hf_config(folder), load_file(folder / "model.safetensors")
    family = family_of(hf)
    experts = family.num_experts(hf)
    engine.begin_update()
    _write(engine, layout, family.params(hf, 1), tensors, experts)
    if layout.draft:
        _write(engine, layout, family.layer(hf, hf["num_hidden_layers"], range(experts)), tensors, experts, draft=True)
    engine.end_update(version)


def _write(
    engine: Engine,
    layout: EngineLayout,
    params: Sequence[Param],
    tensors: Mapping[str, torch.Tensor],
    experts: int,
    draft: bool = False,
) -> None:
    boxes = [OrderBuffer() for _ in range(layout.tp)]
    engine.call_loader([box.make_payload({"do": "describe"}) for box in boxes], draft)
    retained = [box.read_answer()["tensors"] for box in boxes]
    shared = {"model.embed_tokens.weight", "lm_head.weight"} if draft else set()  # the policy's own
    for position, described in enumerate(retained):
        assert shared <= described.keys()
        shapes = {name: tuple(shape) for name, (_, shape) in described.items() if name not in shared}
        assert shapes == engine_shapes(params, layout, position, experts)
    writes = [write_order(params, layout, p, tensors, retained[p], experts) for p in range(layout.tp)]
    engine.call_loader([box.make_payload(*write) for box, write in zip(boxes, writes, strict=True)], draft)
    assert [box.read_answer() for box in boxes] == [{"wrong": []}] * layout.tp
    engine.call_loader([box.make_payload({"do": "finish"}) for box in boxes], draft)
    assert [box.read_answer() for box in boxes] == [{}] * layout.tp


def write_order(
    params: Sequence[Param],
    engine: EngineLayout,
    position: int,
    tensors: Mapping[str, torch.Tensor],
    retained: Mapping[str, Sequence[Any]],
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
        slot = engine.slot_of(param)
        assert slot is not None
        dtypes[slot.name] = retained[slot.name][0]
        for index in engine.expert_indices(position, param, num_experts):
            for source, dim, start, stop, offset in engine.slices_of_rank(position, param):
                box = tensors[param.hf[source].name].narrow(dim, start, stop - start)
                box = box.to(getattr(torch, dtypes[slot.name]))
                r0, c0 = (offset, 0) if dim == 0 else (0, offset)
                r1, c1 = r0 + box.shape[0], c0 + (box.shape[1] if box.dim() == 2 else 1)
                where = add(box), add(torch.tensor([device_hash(box)]))
                stacked = index if slot.grid == "expert" else -1
                slices.append([slot.name, stacked, r0, r1, c0, c1, *where])
    data = torch.cat(parts)
    order = {"do": "write", "version": 1, "tensor_dtype": dtypes, "slices": slices}
    return order, allocate(len(data)).copy_(data)
