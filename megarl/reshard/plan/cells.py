"""Divide the model into cells, boxes of HF tensors that no shard boundary of either side crosses.

Cells with the same holders and needers form a cell group: a sequence of bytes, cell after cell and row by row. The
cells of a kind of layer are computed once, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import numpy as np

from megarl.config import ConfigError
from megarl.models.config_json import need
from megarl.models.fp8 import BLOCK, is_quantised
from megarl.models.layout_algebra import EngineGrid, HFConfig, HFTensor, Param, layer_of, matrix_shape
from megarl.reshard.plan.layout import EngineLayout, Plane, ShardSlice, TrainLayout, Wire, planes


class Cell(NamedTuple):
    """A box (rows and columns) of HF tensor `source` of parameter number `param` of the kind; see `LayerKind.params`.

    item_bytes: bytes of an element. unit_bytes: bytes of the rows that stay together when the cell is cut. is_scale:
    the box is one of the scales. Rows and columns are counted in elements of the `layout.Plane`.
    """

    param: int
    source: int
    r0: int
    r1: int
    c0: int
    c1: int
    item_bytes: int
    unit_bytes: int
    is_scale: bool

    @property
    def nbytes(self) -> int:
        return (self.r1 - self.r0) * (self.c1 - self.c0) * self.item_bytes


class CellGroup(NamedTuple):
    """Cells that the same ranks of a stage hold and the same positions of each engine need.

    train_shards: shards of Megatron's layout. ep_rank: expert parallel rank of the experts; None for other parameters.
    engine_positions: ranks within an engine. experts: each of them has all the cells; (None,) for other parameters.
    """

    train_shards: tuple[int, ...]
    ep_rank: int | None
    engine_positions: tuple[int, ...]
    experts: tuple[int | None, ...]
    cells: tuple[Cell, ...]


class LayerTable(Protocol):
    """The parameters that a plan moves, layer by layer: those of a `models.family.Family`, or their adapters."""

    def check(self, hf: HFConfig, /) -> None: ...
    def num_experts(self, hf: HFConfig, /) -> int: ...
    def num_mtp_layers(self, hf: HFConfig, /) -> int: ...
    def before_decoder(self, hf: HFConfig, /) -> list[Param]: ...
    def after_decoder(self, hf: HFConfig, /) -> list[Param]: ...
    def engine_layer(self, hf: HFConfig, layer: int, experts: Iterable[int], /) -> list[Param]: ...


@dataclass
class LayerKind:
    """Layers that are alike, or what precedes or follows the decoder.

    params: of its first layer, with only the first expert. layers: (stage, layer) of each; layer None outside of the
    decoder.
    """

    params: list[Param]
    layers: list[tuple[int, int | None]]
    cell_groups: list[CellGroup]


def list_layer_kinds(
    hf: HFConfig, family: LayerTable, train: TrainLayout, engine: EngineLayout, wire: Wire, min_piece: int
) -> list[LayerKind]:
    """Return the kinds of layers of the whole model. Raises ConfigError if a layout does not divide the model."""
    family.check(hf)
    num_layers, experts = int(hf["num_hidden_layers"]), family.num_experts(hf)
    extra = family.num_mtp_layers(hf) if engine.draft else 0
    if extra > 1:
        raise ConfigError(f"{extra} layers of multi-token prediction: an engine's draft model has one")
    if engine.fuse_shared and (shared := need(hf, "n_shared_experts")) > 1:
        raise ConfigError(f"an engine that fuses the shared expert has one, the model {shared}")
    if experts % train.ep:
        raise ConfigError(f"parallel.ep={train.ep} does not divide the model's {experts} experts")
    layers: list[tuple[int | None, list[Param]]] = [
        (None, family.before_decoder(hf)),
        (None, family.after_decoder(hf)),
    ]
    layers += [(layer, family.engine_layer(hf, layer, range(min(1, experts)))) for layer in range(num_layers + extra)]
    kinds: dict[tuple[object, object], LayerKind] = {}
    for layer, params in layers:
        if not params:  # without adapters
            continue
        key = _signature(params, layer), () if layer is None else engine.experts.get(layer, ())
        kind = kinds.setdefault(key, LayerKind(params, [], []))
        kind.layers.append((train.stage_of(params[0]), layer))
    if wire == "fp8":
        _check_blocks([param for kind in kinds.values() for param in kind.params if is_quantised(param)], engine)
    for kind in kinds.values():
        kind.cell_groups = _build_cell_groups(kind.params, experts, train, engine, wire, min_piece)
    return list(kinds.values())


def _signature(params: Sequence[Param], layer: int | None) -> tuple[object, ...]:
    """Return what makes two layers the same to the planner."""
    return tuple(
        (
            param.megatron if layer is None else param.megatron.replace(f".{layer}.", ".#."),
            tuple(tensor.shape for tensor in param.hf),
            param.sharding,
            param.slot and (param.slot.sharding, param.slot.grid, param.slot.offset, param.slot.is_draft),
            param.is_sent_as_fp32,
        )
        for param in params
    )


def _build_cell_groups(
    params: Sequence[Param], experts: int, train: TrainLayout, engine: EngineLayout, wire: Wire, min_piece: int
) -> list[CellGroup]:
    cells: dict[tuple[bool, tuple[int, ...], tuple[int, ...]], list[Cell]] = {}
    for number, param in enumerate(params):
        if (slot := engine.slot_of(param)) is None:
            continue
        shard_of = [engine.shard_index(position, slot.grid) for position in range(engine.tp)]
        for cell, train_shards, engine_shards in _cells(number, param, train, engine, wire, min_piece):
            positions = tuple(p for p, shard in enumerate(shard_of) if shard in engine_shards)
            cells.setdefault((param.expert is not None, train_shards, positions), []).append(cell)
    dense, routed = ([(*key[1:], tuple(cells[key])) for key in cells if key[0] == expert] for expert in (False, True))
    cell_groups = [CellGroup(shards, None, positions, (None,), members) for shards, positions, members in dense]
    if routed:
        experts_by_owner: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        layer = layer_of(params[0].megatron)
        experts_of = [set(engine.experts_at(p, layer, experts)) for p in range(engine.tp)]
        for expert in range(experts):
            expert_positions = tuple(p for p in range(engine.tp) if expert in experts_of[p])
            experts_by_owner.setdefault((expert // (experts // train.ep), expert_positions), []).append(expert)
        for (ep_rank, expert_positions), numbers in experts_by_owner.items():
            for shards, positions, members in routed:
                receivers = tuple(p for p in expert_positions if p in positions)
                cell_groups.append(CellGroup(shards, ep_rank, receivers, tuple(numbers), members))
    return cell_groups


def _cells(
    number: int, param: Param, train: TrainLayout, engine: EngineLayout, wire: Wire, min_piece: int
) -> Iterable[tuple[Cell, tuple[int, ...], tuple[int, ...]]]:
    """Yield every cell of a parameter with the trainer's shards and the engine's shards that contain it."""
    slot = engine.slot_of(param)
    assert slot is not None
    expert = param.expert is not None
    train_slices = [train.slices_of_shard(part, param) for part in range(train.num_shards(expert))]
    engine_slices = [engine.slices_of_shard(part, param) for part in range(engine.num_shards(slot.grid))]
    sent = planes(param, wire)
    has_scales = len(sent) > 1
    for source, tensor in enumerate(param.hf):
        shape = matrix_shape(tensor.shape)
        if has_scales and wire == "int4":
            if shape[1] % sent[1].columns:
                raise ConfigError(f"{tensor.name} has {shape[1]} columns, which are not groups of {sent[1].columns}")
            if engine.fuse_shared:
                raise ConfigError("an engine with INT4 experts cannot fuse the shared expert, which is not INT4")
            # Scales of FP8 are reduced over the ranks that share a block; groups of INT4 are not shared.
            for slices, side in ((engine_slices, "engine"), (train_slices, "trainer")):
                _check_groups(tensor, chain(*slices), source, sent[1].columns, side)
        for is_scale, plane in enumerate(sent):
            held_boxes, needed_boxes = (
                [_boxes(slices, source, shape, plane) for slices in side] for side in (train_slices, engine_slices)
            )
            item = plane.dtype.itemsize
            unit = sent[1].rows if has_scales and not is_scale else 1
            boxes = list(chain(*held_boxes, *needed_boxes))
            rows = sorted({edge for box in boxes for edge in box[:2]})
            columns = sorted({edge for box in boxes for edge in box[2:]})
            for r0, r1 in pairwise(rows):
                for c0, c1 in pairwise(columns):
                    train_shards = _shards_containing(held_boxes, r0, c0)
                    engine_shards = _shards_containing(needed_boxes, r0, c0)
                    if not engine_shards:
                        continue
                    if not train_shards:
                        raise ValueError(f"no rank of the trainer has rows {r0}... of {tensor.name}")
                    cell = Cell(number, source, r0, r1, c0, c1, item, unit * (c1 - c0) * item, bool(is_scale))
                    if cell.nbytes <= min_piece:
                        cell = cell._replace(unit_bytes=cell.nbytes)
                    yield cell, train_shards, engine_shards


def _boxes(
    slices: Iterable[ShardSlice], source: int, shape: tuple[int, ...], plane: Plane
) -> list[tuple[int, int, int, int]]:
    """Return a shard's boxes (r0, r1, c0, c1) of a plane of a tensor of this shape, in the plane's elements."""
    boxes = []
    for interval in slices:
        if interval.source == source:
            rows, columns = plane.shape(shape[0], shape[1])
            box = [0, rows, 0, columns]
            box[2 * interval.dim : 2 * interval.dim + 2] = plane.scale(interval)[2:4]
            boxes.append((box[0], box[1], box[2], box[3]))
    return boxes


def _check_blocks(params: Iterable[Param], engine: EngineLayout) -> None:
    """Raise ConfigError if the engine cuts or shifts blocks of quantised matrices, naming sizes that do not.

    SGLang refuses such cuts too: the scale of a block would belong to two ranks.
    """
    by_grid: dict[EngineGrid, list[Param]] = {}
    for param in params:
        if slot := engine.slot_of(param):
            by_grid.setdefault(slot.grid, []).append(param)
    cuts = {
        grid: cut
        for grid, members in by_grid.items()
        if (cut := next(filter(None, (_cut_block(param, engine) for param in members)), ""))
    }
    if not cuts:
        return

    def working_sizes(grids: Iterable[EngineGrid], layout: Callable[[int], EngineLayout]) -> list[int]:
        """Return the divisors of the engine's tp with which a layout exists and cuts no block of these grids."""
        members, sizes = [param for grid in grids for param in by_grid[grid]], []
        for size in range(1, engine.tp + 1):
            if engine.tp % size == 0:
                with suppress(ConfigError):
                    other = layout(size)
                    if not any(_cut_block(param, other) for param in members):
                        sizes.append(size)
        return sizes

    tp, remedies = engine.tp, []
    if "attention" in cuts and (sizes := working_sizes(["attention"], lambda dp: replace(engine, dp=dp))):
        remedies.append(f"rollout.sglang.attn_dp_size={_alternatives(sizes)}")
    if "mlp" in cuts and "expert" in by_grid:
        remedies.append("rollout.sglang.moe_dense_tp_size=1")
    if "shared" in cuts:
        remedies.append(f"rollout.sglang.moe_a2a_backend=deepep with rollout.ep={tp}")
    elif "expert" in cuts and (sizes := working_sizes(["expert"], lambda ep: replace(engine, ep=ep))):
        remedies.append(f"rollout.ep={_alternatives(sizes)}")
    others = working_sizes(by_grid, lambda size: replace(engine, tp=size, ep=min(engine.ep, size), ranks=()))
    choices = [f"with rollout.tp={tp} set {' and '.join(remedies)}"] if remedies else []
    choices += [f"set rollout.tp={_alternatives(others)}"] if others else []
    raise ConfigError(
        f"{'; '.join(cuts.values())}: they cannot be sent as FP8, and SGLang refuses them; "
        f"{', or '.join([*choices, 'use a BF16 checkpoint'])}"
    )


def _cut_block(param: Param, engine: EngineLayout) -> str:
    """Describe how an engine cuts or shifts a block of a quantised matrix; empty if it does not."""
    slot = engine.slot_of(param)
    assert slot is not None
    parts = engine.num_shards(slot.grid)
    for interval in chain(*(engine.slices_of_shard(part, param) for part in range(parts))):
        tensor = param.hf[interval.source]
        if any(edge % BLOCK and edge != tensor.shape[interval.dim] for edge in (interval.start, interval.stop)):
            rows = "columns" if interval.dim else "rows"
            return f"{tensor.name} in {parts} parts of {interval.stop - interval.start} {rows} cuts blocks of {BLOCK}"
        if interval.offset % BLOCK:
            return f"{tensor.name} begins at {interval.offset} of the engine's tensor, within a block of {BLOCK}"
    return ""


def _alternatives(sizes: Sequence[int]) -> str:
    *first, last = map(str, sizes)
    return f"{', '.join(first)} or {last}" if first else last


def _check_groups(tensor: HFTensor, slices: Iterable[ShardSlice], source: int, group: int, side: str) -> None:
    """Raise ConfigError if a side cuts the groups of columns that share a scale of an INT4 matrix.

    side: "trainer" or "engine".
    """
    where = f"{tensor.name} cannot be sent as INT4"
    sizes = "another tensor or expert parallel size for the engine" if side == "engine" else "another parallel.etp"
    for interval in slices:
        if interval.source != source or interval.dim != 1:
            continue
        if any(edge % group and edge != tensor.shape[1] for edge in (interval.start, interval.stop)):
            raise ConfigError(
                f"{where}: the {side} cuts it at {interval.start} and {interval.stop}, through a block of {group}; "
                f"use {sizes}{', or an engine in BF16' if side == 'engine' else ''}"
            )


def _shards_containing(side: Sequence[Sequence[tuple[int, int, int, int]]], row: int, column: int) -> tuple[int, ...]:
    return tuple(
        part for part, boxes in enumerate(side) if any(r0 <= row < r1 and c0 <= column < c1 for r0, r1, c0, c1 in boxes)
    )


class ByteIndex(NamedTuple):
    """All cell groups of all kinds, concatenated into one linear byte range, as arrays.

    start [C + 1]: first byte of each cell. cell, expert [C]: which of `cells` it is, for which expert (-1: none).
    row_bytes, unit_bytes [C]: bytes of a row, and bytes that stay together. cell_group_start [F + 1]: first byte of
    each cell group.
    """

    start: np.ndarray
    cell: np.ndarray
    cells: list[Cell]
    expert: np.ndarray
    row_bytes: np.ndarray
    unit_bytes: np.ndarray
    cell_group_start: np.ndarray

    def snap_to_cut(self, position: np.ndarray) -> np.ndarray:
        """Return for each position the nearest one at or before it where a cut is allowed."""
        cell = np.searchsorted(self.start, position, side="right") - 1
        cell = np.minimum(cell, len(self.unit_bytes) - 1)
        inside = position - self.start[cell]
        return np.where(
            position >= self.start[-1], position, self.start[cell] + inside - inside % self.unit_bytes[cell]
        )


def build_byte_index(kinds: Sequence[LayerKind]) -> ByteIndex:
    """Concatenate the cell groups, in the order of the kinds and their lists."""
    cells: list[Cell] = []
    index, experts, group_sizes = [], [], [0]
    for group in (group for kind in kinds for group in kind.cell_groups):
        indices = np.arange(len(cells), len(cells) + len(group.cells))
        cells += group.cells
        index.append(np.tile(indices, len(group.experts)))
        experts.append(np.repeat([-1 if expert is None else expert for expert in group.experts], len(indices)))
        group_sizes.append(len(index[-1]))
    cell = np.concatenate(index)
    sizes = np.array([(c.nbytes, (c.c1 - c.c0) * c.item_bytes, c.unit_bytes) for c in cells], dtype=np.int64)
    nbytes, row_bytes, unit_bytes = sizes[cell].T
    start = np.concatenate([[0], np.cumsum(nbytes)])
    cell_group_start = start[np.cumsum(group_sizes)]
    return ByteIndex(start, cell, cells, np.concatenate(experts), row_bytes, unit_bytes, cell_group_start)
