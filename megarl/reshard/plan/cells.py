"""Divide the model into cells, boxes of HF tensors that no shard boundary of either side crosses.

Cells with the same holders and needers form a cell group: a sequence of bytes, cell after cell and row by row. The
cells of a kind of layer are computed once, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from megarl.config import ConfigError
from megarl.models.config_json import need
from megarl.models.fp8 import BLOCK, is_quantised
from megarl.models.layout_algebra import HFConfig, Param, layer_of
from megarl.models.registry import family_of
from megarl.reshard.plan.layout import EngineLayout, ShardSlice, TrainLayout, Wire, wire_itemsize


class Cell(NamedTuple):
    """A box (rows and columns) of HF tensor `source` of parameter number `param` of the kind; see `LayerKind.params`.

    item_bytes: bytes of an element. unit_bytes: bytes of the rows that stay together when the cell is cut. is_scale:
    the box is one of the scale grid, in blocks.
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
    hf: HFConfig, train: TrainLayout, engine: EngineLayout, wire: Wire, min_piece: int
) -> list[LayerKind]:
    """Return the kinds of layers of the whole model. Raises ConfigError if a layout does not divide the model."""
    family = family_of(hf)
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
    layers += [(layer, family.layer(hf, layer, range(min(1, experts)))) for layer in range(num_layers + extra)]
    kinds: dict[tuple[object, object], LayerKind] = {}
    for layer, params in layers:
        key = _signature(params, layer), () if layer is None else engine.experts.get(layer, ())
        kind = kinds.setdefault(key, LayerKind(params, [], []))
        kind.layers.append((train.stage_of(params[0]), layer))
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
            param.dtype,
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
    quantised = wire == "fp8" and is_quantised(param)
    for source, tensor in enumerate(param.hf):
        shape = tensor.shape[0], prod(tensor.shape[1:])
        if quantised:
            _check_blocks(tensor.name, shape, chain(*engine_slices), source)
        for scale in (False, True) if quantised else (False,):
            held_boxes, needed_boxes = (
                [_boxes(slices, source, shape, BLOCK if scale else 1) for slices in side]
                for side in (train_slices, engine_slices)
            )
            item = 4 if scale else wire_itemsize(param, wire)
            unit = BLOCK if quantised and not scale else 1
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
                    cell = Cell(number, source, r0, r1, c0, c1, item, unit * (c1 - c0) * item, scale)
                    if cell.nbytes <= min_piece:
                        cell = cell._replace(unit_bytes=cell.nbytes)
                    yield cell, train_shards, engine_shards


def _boxes(
    slices: Iterable[ShardSlice], source: int, shape: tuple[int, ...], unit: int
) -> list[tuple[int, int, int, int]]:
    """Return a shard's boxes (r0, r1, c0, c1) of a tensor, in elements, or of its scale grid, in units of a block."""
    boxes = []
    for interval in slices:
        if interval.source == source:
            box = [0, shape[0], 0, shape[1]]
            box[2 * interval.dim : 2 * interval.dim + 2] = interval.start, interval.stop
            boxes.append((box[0] // unit, -(-box[1] // unit), box[2] // unit, -(-box[3] // unit)))
    return boxes


def _check_blocks(name: str, shape: tuple[int, ...], slices: Iterable[ShardSlice], source: int) -> None:
    """Raise ConfigError if the engine cuts or shifts the blocks of a quantised tensor."""
    for interval in slices:
        if interval.source != source:
            continue
        if any(edge % BLOCK and edge != shape[interval.dim] for edge in (interval.start, interval.stop)):
            raise ConfigError(
                f"{name} cannot be sent as FP8: the engine cuts it at {interval.start} and {interval.stop}, through a "
                f"block of {BLOCK}; use another tensor or expert parallel size for the engine, or an engine in BF16"
            )
        if interval.offset % BLOCK:
            raise ConfigError(
                f"{name} cannot be sent as FP8: in the engine's tensor it begins at {interval.offset}, within a block "
                f"of {BLOCK}; use an engine in BF16"
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
