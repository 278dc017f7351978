"""What has to go from which ranks to which: the model cut at every border of either side.

A `Cell` is a box of one HF tensor that no border of either side crosses, so whole cells are held and needed. Cells with
the same holders and the same needers make a flow, which is a line of bytes: its cells one after another, each row by
row. Layers that are alike have the same cells: these are made once for each kind of layer, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from megarl.config import ConfigError
from megarl.models import blocks
from megarl.models.config_json import need
from megarl.models.fp8 import BLOCK, is_quantised
from megarl.models.layout_algebra import HFConfig, Param, layer_of
from megarl.models.registry import family_of
from megarl.reshard.plan.layout import EngineLayout, ShardSlice, TrainLayout

Wire = Literal["bf16", "fp32", "fp8"]


class Cell(NamedTuple):
    """Rows and columns of a box of HF tensor `source` of parameter number `param` of the kind; see `Kind.params`.

    item: bytes of an element. unit: rows that stay together when a cell is cut, in bytes. scale: the box is one of the
    grid of scales, in blocks.
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

    parts: of Megatron's cut. ep_rank: of the experts in question, None for the others. positions: of an engine's ranks.
    experts: each of them has all the cells; (None,) where it is not about experts.
    """

    train_shards: tuple[int, ...]
    ep_rank: int | None
    engine_positions: tuple[int, ...]
    experts: tuple[int | None, ...]
    cells: tuple[Cell, ...]


@dataclass
class LayerKind:
    """Layers that are alike, or what is before or behind the decoder.

    params: of its first layer, with only the first expert. layers: (stage, layer) of each; layer None outside.
    """

    params: list[Param]
    layers: list[tuple[int, int | None]]
    cell_groups: list[CellGroup]


def list_layer_kinds(
    hf: HFConfig, train: TrainLayout, engine: EngineLayout, wire: Wire, min_piece: int
) -> list[LayerKind]:
    """The whole model. Raises ConfigError where a layout does not divide it."""
    family = family_of(hf)
    family.check(hf)
    first, last = blocks.embedding(hf), blocks.final_params(hf)
    kinds: dict[tuple[object, object], LayerKind] = {}
    for params, stage in ((first, 0), (last, train.pp - 1)):
        kinds[_signature(params, None), ()] = LayerKind(params, [(stage, None)], [])
    num_layers, experts = int(hf["num_hidden_layers"]), family.num_experts(hf)
    extra = family.num_mtp_layers(hf) if engine.draft else 0
    if extra > 1:
        raise ConfigError(f"{extra} layers of multi-token prediction: an engine's draft model has one")
    if engine.fuse_shared and (shared := need(hf, "n_shared_experts")) > 1:
        raise ConfigError(f"an engine that fuses the shared expert has one, the model {shared}")
    if experts % train.ep:
        raise ConfigError(f"parallel.ep={train.ep} does not divide the model's {experts} experts")
    for layer in range(num_layers + extra):
        params = family.layer(hf, layer, range(min(1, experts)))
        key = _signature(params, layer), engine.experts.get(layer, ())
        kind = kinds.setdefault(key, LayerKind(params, [], []))
        stage = train.stage_of_layer(layer if layer < num_layers else None)
        kind.layers.append((stage, layer))
    for kind in kinds.values():
        kind.cell_groups = _build_cell_groups(kind.params, experts, train, engine, wire, min_piece)
    return list(kinds.values())


def _signature(params: Sequence[Param], layer: int | None) -> tuple[object, ...]:
    """What makes two layers the same to a planner."""
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
    gathered: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Cell]] = {}
    routed: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Cell]] = {}
    places: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}  # of an engine: by grid and its parts
    for number, param in enumerate(params):
        slot = engine.slot_of(param)
        if slot is None:
            continue
        for cell, held, needed in _cells(number, param, train, engine, wire, min_piece):
            if param.expert is None:
                key = slot.grid, needed
                if key not in places:
                    places[key] = tuple(p for p in range(engine.tp) if engine.shard_index(p, slot.grid) in needed)
                gathered.setdefault((held, places[key]), []).append(cell)
            else:
                routed.setdefault((held, needed), []).append(cell)
    flows = [CellGroup(held, None, positions, (None,), tuple(cells)) for (held, positions), cells in gathered.items()]
    if routed:
        template = next(param for param in params if param.expert is not None)
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        share = experts // train.ep
        layer = layer_of(template.megatron)
        at = [set(engine.experts_at(p, layer, experts)) for p in range(engine.tp)]
        for expert in range(experts):
            having = tuple(p for p in range(engine.tp) if expert in at[p])
            groups.setdefault((expert // share, having), []).append(expert)
        for (ep_rank, having), members in groups.items():
            for (held, needed), cells in routed.items():
                positions = tuple(p for p in having if engine.shard_index(p, "expert") in needed)
                flows.append(CellGroup(held, ep_rank, positions, tuple(members), tuple(cells)))
    return flows


def _cells(
    number: int, param: Param, train: TrainLayout, engine: EngineLayout, wire: Wire, min_piece: int
) -> Iterable[tuple[Cell, tuple[int, ...], tuple[int, ...]]]:
    """Every cell of a parameter with the parts of either side's cut that have it."""
    slot = engine.slot_of(param)
    assert slot is not None
    expert = param.expert is not None
    ours = [train.slices_of_shard(part, param) for part in range(train.num_shards(expert))]
    theirs = [engine.slices_of_shard(part, param) for part in range(engine.num_shards(slot.grid))]
    quantised = wire == "fp8" and is_quantised(param)
    for source, tensor in enumerate(param.hf):
        shape = tensor.shape if len(tensor.shape) == 2 else (tensor.shape[0], 1)
        for scale in (False, True) if quantised else (False,):
            held = [_boxes(side, source, shape, scale, exact=False, name="") for side in ours]
            needed = [_boxes(side, source, shape, scale, exact=True, name=tensor.name) for side in theirs]
            item = _item_bytes(param, wire, quantised, scale)
            unit = BLOCK if quantised and not scale else 1
            rows = sorted({edge for side in (held, needed) for boxes in side for box in boxes for edge in box[:2]})
            columns = sorted({edge for side in (held, needed) for boxes in side for box in boxes for edge in box[2:]})
            for r0, r1 in zip(rows, rows[1:], strict=False):
                for c0, c1 in zip(columns, columns[1:], strict=False):
                    have = _shards_containing(held, r0, c0)
                    want = _shards_containing(needed, r0, c0)
                    if want and not have:
                        raise ValueError(f"no rank of the trainer has rows {r0}... of {tensor.name}")
                    if want:
                        cell = Cell(number, source, r0, r1, c0, c1, item, unit * (c1 - c0) * item, scale)
                        if cell.nbytes <= min_piece:
                            cell = cell._replace(unit_bytes=cell.nbytes)
                        yield cell, have, want


def _boxes(
    side: Sequence[ShardSlice], source: int, shape: tuple[int, ...], scale: bool, exact: bool, name: str
) -> list[tuple[int, int, int, int]]:
    """What one part has of a tensor as (r0, r1, c0, c1), or of its grid of scales."""
    found = []
    for held in side:
        if held.source != source:
            continue
        box = [0, shape[0], 0, shape[1]]
        box[2 * held.dim : 2 * held.dim + 2] = held.start, held.stop
        if exact and scale and any(edge % BLOCK and edge != shape[i // 2] for i, edge in enumerate(box)):
            raise ConfigError(
                f"{name} cannot be sent as FP8: the engine cuts it at {held.start} and {held.stop}, through a block of "
                f"{BLOCK}; choose another tensor or expert parallel size for the engine, or an engine in BF16"
            )
        if exact and scale and held.offset % BLOCK:
            raise ConfigError(
                f"{name} cannot be sent as FP8: in the engine's tensor it begins at {held.offset}, within a block of "
                f"{BLOCK}; take an engine in BF16"
            )
        if scale:
            box = [box[0] // BLOCK, -(-box[1] // BLOCK), box[2] // BLOCK, -(-box[3] // BLOCK)]
        found.append((box[0], box[1], box[2], box[3]))
    return found


def _shards_containing(side: Sequence[Sequence[tuple[int, int, int, int]]], row: int, column: int) -> tuple[int, ...]:
    return tuple(
        part for part, boxes in enumerate(side) if any(r0 <= row < r1 and c0 <= column < c1 for r0, r1, c0, c1 in boxes)
    )


def _item_bytes(param: Param, wire: Wire, quantised: bool, scale: bool) -> int:
    if scale or wire == "fp32" or (param.dtype is not None and param.dtype.itemsize == 4):
        return 4
    return 1 if quantised else 2


class ByteIndex(NamedTuple):
    """All flows of all kinds behind one another on one line of bytes, as arrays.

    start [C + 1]: where each cell begins. kind, cell, expert [C]: which it is (expert -1: none). unit [C]: bytes that
    stay together. flow_start [F + 1]: where each flow begins; flow_kind [F].
    """

    start: np.ndarray
    kind: np.ndarray
    cell: np.ndarray
    cells: list[Cell]
    expert: np.ndarray
    unit_bytes: np.ndarray
    cell_group_start: np.ndarray
    cell_group_kind: np.ndarray

    def snap_to_cut(self, position: np.ndarray) -> np.ndarray:
        """The nearest places at or before these where the line may be cut."""
        cell = np.searchsorted(self.start, position, side="right") - 1
        cell = np.minimum(cell, len(self.unit_bytes) - 1)
        inside = position - self.start[cell]
        return np.where(
            position >= self.start[-1], position, self.start[cell] + inside - inside % self.unit_bytes[cell]
        )


def build_byte_index(kinds: Sequence[LayerKind]) -> ByteIndex:
    """Flows in the order of the kinds and of their lists."""
    cells: list[Cell] = []
    index, experts, kind_of, flow_cells, flow_kind = [], [], [], [], []
    for number, kind in enumerate(kinds):
        for flow in kind.cell_groups:
            first = len(cells)
            cells += flow.cells
            own = np.arange(first, len(cells))
            index.append(np.tile(own, len(flow.experts)))
            members = np.array([-1 if e is None else e for e in flow.experts])
            experts.append(np.repeat(members, len(own)))
            kind_of.append(np.full(len(own) * len(members), number))
            flow_cells.append(len(own) * len(members))
            flow_kind.append(number)
    cell = np.concatenate(index)
    sizes = np.array([c.nbytes for c in cells], dtype=np.int64)[cell]
    start = np.concatenate([[0], np.cumsum(sizes)])
    return ByteIndex(
        start=start,
        kind=np.concatenate(kind_of),
        cell=cell,
        cells=cells,
        expert=np.concatenate(experts),
        unit_bytes=np.array([c.unit_bytes for c in cells], dtype=np.int64)[cell],
        cell_group_start=start[np.concatenate([[0], np.cumsum(flow_cells)])],
        cell_group_kind=np.array(flow_kind),
    )
