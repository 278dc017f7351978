"""Write full HF tensors into an engine by orders from the layout algebra alone, without a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import tiny_models
import torch
from compare import assert_matches_transformers
from engines import RunningEngine
from transformers import PreTrainedModel

from megarl.engine.engine_backends import engine_backend
from megarl.engine.http_engine import HTTPEngine
from megarl.engine.weight_sender import OrderBuffer
from megarl.models.hf_folder import open_hf
from megarl.models.layout_algebra import Param, matrix_shape
from megarl.models.registry import family_of, load_hf_config
from megarl.parallel.device import allocate_shared
from megarl.reshard.plan.layout import EngineLayout, engine_shapes
from megarl.reshard.run.checksum import device_hash

SHARED = {"model.embed_tokens.weight", "lm_head.weight"}
"""Tensors that a draft model has in common with the policy; tied, they are one tensor."""


def check_orders(running: RunningEngine, layout: EngineLayout, new: PreTrainedModel, folder: Path) -> None:
    """Check that an engine generates like `transformers` after orders replaced its weights."""
    overwrite_weights(running.engine, layout, tiny_models.save(new, folder / "ordered"), 7)
    assert_matches_transformers(running.engine, new, 7)


def overwrite_weights(engine: HTTPEngine, layout: EngineLayout, folder: Path, version: int) -> None:
    """Replace all weights of an engine, and of its draft model if `layout` has one, by those of an HF folder. Check
    that the engine has exactly the tensors of the table."""
    hf, weights = load_hf_config(folder), open_hf(folder)
    family = family_of(hf)
    experts = family.num_experts(hf)
    params, drafts = family.params(hf, 1), []
    if layout.draft:
        drafts = family.layer(hf, hf["num_hidden_layers"], range(experts))
    tensors = {tensor.name: weights.get(tensor.name) for param in (*params, *drafts) for tensor in param.hf}
    engine.begin_update()
    _write(engine, layout, params, tensors, experts)
    if layout.draft:
        shared = {"model.embed_tokens.weight"} if hf["tie_word_embeddings"] else SHARED
        _write(engine, layout, drafts, tensors, experts, shared)
    engine.end_update(version)


def _write(
    engine: HTTPEngine,
    layout: EngineLayout,
    params: Sequence[Param],
    tensors: Mapping[str, torch.Tensor],
    experts: int,
    shared: Set[str] = frozenset(),
) -> None:
    """Write parameters into the policy, or into a draft model, which has `shared` tensors in common with it."""
    draft = bool(shared)
    order_buffers = [OrderBuffer(engine_backend(engine.config)) for _ in range(layout.tp)]
    engine.call_loader([box.make_payload({"do": "describe"}) for box in order_buffers], draft)
    descriptions = [box.read_answer()["tensors"] for box in order_buffers]
    for position, tensors_of_rank in enumerate(descriptions):
        assert tensors_of_rank.keys() & shared in (shared, set())  # vLLM's loader leaves them out
        shapes = {name: tuple(shape) for name, (_, shape) in tensors_of_rank.items() if name not in shared}
        rows = [part for row in params for part in row.by_slot()]
        assert shapes == engine_shapes(rows, layout, position, experts)
    writes = [make_write_order(params, layout, p, tensors, descriptions[p], experts) for p in range(layout.tp)]
    engine.call_loader([box.make_payload(*write) for box, write in zip(order_buffers, writes, strict=True)], draft)
    assert [box.read_answer() for box in order_buffers] == [{"wrong": []}] * layout.tp
    engine.call_loader([box.make_payload({"do": "finish"}) for box in order_buffers], draft)
    assert [box.read_answer() for box in order_buffers] == [{}] * layout.tp


def make_write_order(
    params: Sequence[Param],
    engine: EngineLayout,
    position: int,
    tensors: Mapping[str, torch.Tensor],
    descriptions: Mapping[str, Sequence[Any]],
    num_experts: int,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the order and bucket that write all of these parameters that the engine's rank `position` holds.

    tensors: HF tensors by name, of any dtype. descriptions: the rank's answer to "describe", by name [dtype, shape].
    """
    slices: list[list[Any]] = []
    parts: list[torch.Tensor] = []
    position_in_bucket = 0

    def add(part: torch.Tensor) -> int:
        nonlocal position_in_bucket
        data = part.contiguous().view(-1).view(torch.uint8)
        start, position_in_bucket = position_in_bucket, position_in_bucket + -(-data.numel() // 16) * 16
        parts.extend((data, data.new_zeros(position_in_bucket - start - data.numel())))
        return start

    dtypes = {}
    for param in (part for row in params for part in row.by_slot()):
        engine_slot = engine.slot_of(param)
        assert engine_slot is not None
        dtypes[engine_slot.name] = descriptions[engine_slot.name][0]
        for index in engine.expert_indices(position, param, num_experts):
            for source, dim, start, stop, offset in engine.slices_of_rank(position, param):
                box = tensors[param.hf[source].name].narrow(dim, start, stop - start)
                box = box.to(getattr(torch, dtypes[engine_slot.name]))
                r0, c0 = (offset, 0) if dim == 0 else (0, offset)
                r1, c1 = r0 + box.shape[0], c0 + matrix_shape(box.shape)[1]
                offsets = add(box), add(torch.tensor([device_hash(box)]))
                stacked = index if engine_slot.grid == "expert" else -1
                slices.append([engine_slot.name, stacked, r0, r1, c0, c1, *offsets])
    data = torch.cat(parts)
    order = {"do": "write", "version": 1, "tensor_dtype": dtypes, "slices": slices}
    return order, allocate_shared(len(data)).copy_(data)
