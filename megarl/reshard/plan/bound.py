"""Lower bounds: the fewest bytes that any plan can move, and the fewest that its busiest rank can, by other code and
another method than the planner's. `README.md` derives them under "The bound"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config import ConfigError
from megarl.models import fp8, int4
from megarl.models.config_json import need
from megarl.models.layout_algebra import HFConfig, Param, matrix_shape
from megarl.models.registry import family_of
from megarl.reshard.plan.layout import (
    EngineLayout,
    RankMap,
    ShardSlice,
    TrainLayout,
    Wire,
    build_rank_map,
)

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BLOCK = 128  # rows and columns of an FP8 block; each has an fp32 scale
GROUP = 32  # columns of an INT4 group; each has a bf16 scale
SCALE_BYTES = 4
NETWORK_SLACK = 1.05
"""In the plans that `send_capped` bounds, no rank sends more than this times `nic_send` over the network."""
SHARING_ROUNDS = 400  # iterations of the fractional sharing that suggests busy sets; more raise the bound only a little
MARGINS = (0.0, 0.003, 0.01)  # relative differences that count as equal there, since loads never become quite equal


@dataclass(frozen=True, eq=False)
class Bound:
    """Bounds in bytes.

    model_bytes: the whole model once. needed, local, cross: per rank. internode: per node. The others: of the busiest
    rank; `send_capped` is for plans that keep to NETWORK_SLACK over the network. For the senders' bounds and
    `nic_recv`, `attainable` is the load in the best sharing of the jobs that was found, and `forced_on` are the ranks
    of the set that forces the bound.
    """

    model_bytes: int
    needed: Ints
    local: Ints
    cross: Ints
    internode: Ints
    send: float
    send_capped: float
    recv: float
    nic_send: float
    nic_recv: float
    attainable: dict[str, float]
    forced_on: dict[str, tuple[int, ...]]

    @property
    def needed_bytes(self) -> int:
        return int(self.needed.sum())

    @property
    def local_bytes(self) -> int:
        return int(self.local.sum())

    @property
    def cross_bytes(self) -> int:
        return int(self.cross.sum())

    @property
    def internode_bytes(self) -> int:
        return int(self.internode.sum())


class Columns(NamedTuple):
    """Distinct columns of both matrices, each standing for `weight` bytes. `holds` has a row per rank of the stage
    with the parameters, `needs` one per rank of an engine."""

    holds: Bools
    needs: Bools
    weight: Ints


class LayerColumns(NamedTuple):
    """A decoder layer, or what is outside of the decoder (layer None), with the columns of its parameters."""

    stage: int
    layer: int | None
    columns: Columns


def compute_bound(
    hf: HFConfig, train: TrainLayout, engine: EngineLayout, ranks_per_node: int, wire: Wire = "bf16"
) -> Bound:
    """Compute the bound for moving the whole model once from the trainer's ranks to the engines'. Raises ConfigError
    if a layout does not divide the model or its ranks."""
    rank_map = build_rank_map(train, engine, ranks_per_node)
    world, ranks_per_stage, node_size = rank_map.world, train.stage_ranks, rank_map.ranks_per_node
    needed, local = np.zeros(world, np.int64), np.zeros(world, np.int64)
    internode = np.zeros(world // node_size, np.int64)
    nic_send, nic_recv, send = TransferJobs(), TransferJobs(), TransferJobs()
    model = list_layer_columns(hf, train, engine, wire)
    for stage in sorted({member.stage for member in model}):
        columns = _merged([member.columns for member in model if member.stage == stage])
        holds, needs = expand_to_ranks(columns, stage, train, engine, rank_map)
        weight = columns.weight
        needed += needs @ weight
        local += (needs & holds) @ weight
        node_holds, node_lacks = (m.reshape(len(internode), node_size, -1) for m in (holds, needs & ~holds))
        copies, is_in_node = node_lacks.sum(1), node_holds.any(1)
        enters = (copies > 0) & ~is_in_node
        internode += enters @ weight
        job_ranks = rank_map.train[stage * ranks_per_stage : (stage + 1) * ranks_per_stage]
        first, last = int(job_ranks.min()), int(job_ranks.max())
        owners = np.full(len(weight), first), holds[first : last + 1].T, weight * enters.sum(0)
        nic_send.add(*owners, network=True)
        send.add(*owners, network=True)

        node, atom = np.nonzero(enters)
        receivers = node * node_size, node_lacks[node, :, atom]
        nic_recv.add(*receivers, weight[atom], network=True)
        send.add(*receivers, weight[atom] * (copies[node, atom] - 1), network=False)
        node, atom = np.nonzero((copies > 0) & is_in_node)
        senders = (node_holds | node_lacks)[node, :, atom]
        send.add(node * node_size, node_holds[node, :, atom], weight[atom], network=False)
        send.add(node * node_size, senders, weight[atom] * (copies[node, atom] - 1), network=False)
    classes = _partition_ranks(train, rank_map)
    all_jobs = {"nic_send": nic_send, "nic_recv": nic_recv, "send": send}
    bounds = {name: jobs.bound_busiest(world, classes) for name, jobs in all_jobs.items()}
    bounds["send_capped"] = send.bound_busiest(world, classes, bounds["nic_send"]) if nic_send.bytes else bounds["send"]
    return Bound(
        model_bytes=sum(int(member.columns.weight.sum()) for member in model),
        needed=needed,
        local=local,
        cross=needed - local,
        internode=internode,
        send=bounds["send"].lower_bound,
        send_capped=max(bounds["send"].lower_bound, bounds["send_capped"].lower_bound),
        recv=float((needed - local).max()),
        nic_send=bounds["nic_send"].lower_bound,
        nic_recv=bounds["nic_recv"].lower_bound,
        attainable={name: busiest.attainable for name, busiest in bounds.items()},
        forced_on={name: busiest.forced_on for name, busiest in bounds.items()},
    )


def list_layer_columns(hf: HFConfig, train: TrainLayout, engine: EngineLayout, wire: Wire) -> list[LayerColumns]:
    """Return the columns of the whole model: embedding, layers, multi-token prediction layers, norm and head."""
    family = family_of(hf)
    family.check(hf)
    experts = family.num_experts(hf)
    if experts % train.ep:
        valid_sizes = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ConfigError(
            f"ep={train.ep} does not divide the {experts} experts of a layer; sizes that do: {valid_sizes}"
        )
    layer_columns = []
    for param in family.before_decoder(hf) + family.after_decoder(hf):
        layer_columns.append(LayerColumns(train.stage_of(param), None, _columns([param], train, engine, experts, wire)))
    kinds: dict[Any, Columns] = {}
    decoder = int(need(hf, "num_hidden_layers"))
    for layer in range(decoder + family.num_mtp_layers(hf)):
        sample = family.engine_layer(hf, layer, range(min(1, experts)))
        kind = (*(_param_signature(param, engine) for param in sample), engine.experts.get(layer))
        if kind not in kinds:
            kinds[kind] = _columns(family.engine_layer(hf, layer, range(experts)), train, engine, experts, wire)
        layer_columns.append(LayerColumns(train.stage_of(sample[0]), layer if layer < decoder else None, kinds[kind]))
    return layer_columns


def expand_to_ranks(
    columns: Columns, stage: int, train: TrainLayout, engine: EngineLayout, rank_map: RankMap
) -> tuple[Bools, Bools]:
    """Return `holds` and `needs` of all ranks of the job, for parameters of this stage."""
    holds, needs = np.zeros((2, rank_map.world, len(columns.weight)), bool)
    needs[rank_map.engine] = np.tile(columns.needs, (len(rank_map.engine) // engine.tp, 1))
    holds[rank_map.train[stage * train.stage_ranks : (stage + 1) * train.stage_ranks]] = columns.holds
    return holds, needs


def _param_signature(param: Param, engine: EngineLayout) -> Any:
    """Return what makes two parameters the same except for their names and experts."""
    slot = engine.slot_of(param)
    shapes = tuple(tensor.shape for tensor in param.hf)
    cuts = param.sharding, slot and (slot.sharding, slot.grid)
    return shapes, cuts, param.expert is None, param.is_sent_as_fp32, fp8.is_quantised(param)


def _columns(params: Iterable[Param], train: TrainLayout, engine: EngineLayout, experts: int, wire: Wire) -> Columns:
    """Return the columns of parameters that are on the same stage."""
    by_signature: dict[Any, tuple[Param, Bools, Bools, int]] = {}
    for param in params:
        if engine.slot_of(param) is None:
            continue
        first = train.stage_of(param) * train.stage_ranks
        is_holder = np.array([train.has_param(first + rank, param, experts) for rank in range(train.stage_ranks)])
        is_receiver = np.array([bool(engine.expert_indices(rank, param, experts)) for rank in range(engine.tp)])
        key = (_param_signature(param, engine), is_holder.tobytes(), is_receiver.tobytes())
        by_signature[key] = (param, is_holder, is_receiver, by_signature[key][3] + 1 if key in by_signature else 1)
    columns = []
    for param, is_holder, is_receiver, count in by_signature.values():
        holds = [train.slices_of_rank(rank, param) if holds_any else [] for rank, holds_any in enumerate(is_holder)]
        needs = [engine.slices_of_rank(rank, param) if needs_any else [] for rank, needs_any in enumerate(is_receiver)]
        is_fp8 = wire == "fp8" and fp8.is_quantised(param)
        for source, tensor in enumerate(param.hf):
            shape = matrix_shape(tensor.shape)
            boxes = [[_box(part, shape) for part in parts if part.source == source] for parts in [*holds, *needs]]
            member, cells = _atoms(boxes, shape)
            if wire == "int4" and int4.is_quantised(param):
                # Nothing cuts a group, so each atom has whole groups of 16 bytes and a scale.
                columns.append((member, cells // GROUP * (GROUP // 2 + 2) * count))
                continue
            is_fp32 = wire == "fp32" or param.is_sent_as_fp32
            itemsize = 4 if is_fp32 else 1 if is_fp8 else 2
            columns.append((member, cells * itemsize * count))
            if is_fp8:
                # A rank that holds any cell of a block has its scale: blocks are quantised before they are cut.
                grid = [[[(a // BLOCK, -(-b // BLOCK)) for a, b in box] for box in rank] for rank in boxes]
                member, cells = _atoms(grid, [-(-n // BLOCK) for n in shape])
                columns.append((member, cells * SCALE_BYTES * count))
    matrix = np.concatenate([np.zeros((train.stage_ranks + engine.tp, 0), bool), *(m for m, _ in columns)], axis=1)
    weight = np.concatenate([np.zeros(0, np.int64), *(w for _, w in columns)])
    return _merged([Columns(matrix[: train.stage_ranks], matrix[train.stage_ranks :], weight)])


def _box(part: ShardSlice, shape: Sequence[int]) -> list[tuple[int, int]]:
    box = [(0, shape[0]), (0, shape[1])]
    box[part.dim] = (part.start, part.stop)
    return box


def _atoms(boxes: Sequence[Sequence[Sequence[tuple[int, int]]]], shape: Sequence[int]) -> tuple[Bools, Ints]:
    """Return which atoms the boxes of each rank cover, and how many cells each atom has."""
    distinct: dict[tuple[Any, ...], int] = {}
    kind = [distinct.setdefault(tuple(map(tuple, rank)), len(distinct)) for rank in boxes]
    edges = []
    for dim in (0, 1):
        cut_points = {at for rank in distinct for box in rank for at in box[dim]}
        edges.append(np.array(sorted(cut_points | {0, shape[dim]})))
    member = np.zeros((len(distinct), len(edges[0]) - 1, len(edges[1]) - 1), bool)
    for index, rank in enumerate(distinct):
        for box in rank:
            (r0, r1), (c0, c1) = (np.searchsorted(edges[dim], box[dim]) for dim in (0, 1))
            member[index, r0:r1, c0:c1] = True
    cells = np.diff(edges[0])[:, None] * np.diff(edges[1])
    return member.reshape(len(distinct), -1)[kind], cells.ravel()


def _merged(parts: Sequence[Columns]) -> Columns:
    """Merge equal columns, and drop those that nobody needs."""
    holds, needs, weight = (np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True))
    is_needed = needs.any(0)
    if not holds[:, is_needed].any(0).all():
        raise ConfigError("an engine needs weights that no rank of the trainer holds; check stages, ep and the table")
    packed = np.packbits(np.concatenate([holds, needs])[:, is_needed], axis=0).T
    _, first, inverse = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    total = np.zeros(len(first), np.int64)
    np.add.at(total, inverse.ravel(), weight[is_needed])
    indices = np.flatnonzero(is_needed)[first]
    return Columns(holds[:, indices], needs[:, indices], total)


def _partition_ranks(train: TrainLayout, rank_map: RankMap) -> list[Ints]:
    """Return the natural partitions of the ranks into sets; each is the set number of every rank."""
    stage, stage_position = np.divmod(np.arange(train.world), train.stage_ranks)
    trainer_labels = [
        np.arange(train.world),
        stage * train.tp + stage_position % train.tp,
        stage * train.ep * train.etp + stage_position % (train.ep * train.etp),
        stage,
    ]
    node = np.arange(rank_map.world) // rank_map.ranks_per_node
    train_labels = np.full((len(trainer_labels), rank_map.world), -1)  # ranks that do not train form a separate set
    train_labels[:, rank_map.train] = trainer_labels
    # If the sides differ: ranks on both sides, on one, on none, per node and overall.
    side = np.isin(np.arange(rank_map.world), rank_map.train) + 2 * np.isin(np.arange(rank_map.world), rank_map.engine)
    side_labels = [np.arange(rank_map.world), side, 4 * node + side] if side.min() < 3 else []
    labels = [*train_labels, node, np.zeros_like(node), *side_labels]
    return [np.unique(label, return_inverse=True)[1].ravel() for label in labels]


class Busiest(NamedTuple):
    """The busiest rank's minimum load, its load in the best sharing that was found, and the set of ranks that forces
    the minimum.

    network_bytes [world]: bytes that each rank sends over the network in that sharing.
    """

    lower_bound: float
    attainable: float
    forced_on: tuple[int, ...]
    network_bytes: Floats


class TransferJobs:
    """Bytes to move, over the network or inside a node, by the set of ranks that can move them."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[bool, int, int, bytes], int] = {}

    def add(self, first: Ints, candidates: Bools, weight: Ints, network: bool) -> None:
        """Add jobs: for each its bytes, and a row of `candidates`, the ranks that can do it, from rank `first` on."""
        rows, width = np.flatnonzero(weight), candidates.shape[1]
        packed_ranks = np.packbits(candidates[rows], axis=1)
        if not len(rows):
            return
        first_bytes = first[rows, None].astype("<i8").view(np.uint8).reshape(len(rows), 8)
        key = np.concatenate([first_bytes, packed_ranks], axis=1)
        distinct, inverse = np.unique(key, axis=0, return_inverse=True)
        total = np.zeros(len(distinct), np.int64)
        np.add.at(total, inverse.ravel(), weight[rows])
        for row, bytes_ in zip(distinct, total.tolist(), strict=True):
            begin = int(row[:8].view("<i8")[0])
            job = (network, begin, width, row[8:].tobytes())
            self.bytes[job] = self.bytes.get(job, 0) + bytes_

    def bound_busiest(self, world: int, partitions: Sequence[Ints], network_bound: Busiest | None = None) -> Busiest:
        """Bound the busiest rank's load.

        partitions: see `_partition_ranks`. network_bound: the result for the same jobs over the network alone; the
        bound is then for sharings in which no rank sends more than NETWORK_SLACK times its `lower_bound` over the
        network.
        """
        if not self.bytes:
            return Busiest(0.0, 0.0, (), np.zeros(world))
        members = [
            begin + np.flatnonzero(np.unpackbits(np.frombuffer(candidates, np.uint8), count=width))
            for _, begin, width, candidates in self.bytes
        ]
        weight = np.array(list(self.bytes.values()), np.float64)
        network = np.array([over_network for over_network, *_ in self.bytes])
        sizes = np.array([len(ranks) for ranks in members])
        starts, ranks = np.cumsum(sizes) - sizes, np.concatenate(members)
        best, forced_on = 0.0, np.zeros(0, np.int64)
        for label in partitions:
            low, high = np.minimum.reduceat(label[ranks], starts), np.maximum.reduceat(label[ranks], starts)
            inside = low == high
            forced = np.bincount(low[inside], weight[inside], minlength=label.max() + 1) / np.bincount(label)
            if forced.max() > best:
                best, forced_on = float(forced.max()), np.flatnonzero(label == forced.argmax())
        cap = NETWORK_SLACK * network_bound.lower_bound if network_bound else weight.sum()
        over_network = np.repeat(network, sizes)
        share = np.repeat(weight / sizes, sizes)
        price_factor = np.ones(world)  # price factor for network jobs on ranks at the cap
        best_load, best_network = np.inf, np.zeros(world)
        for number in range(SHARING_ROUNDS):
            load = np.bincount(ranks, share, minlength=world)
            network_load: NDArray[Any] = np.bincount(ranks[over_network], share[over_network], minlength=world)
            mix, base = 1.0, network_load
            if network_bound and network_load.max() > cap:
                # Mix with a sharing below the cap, so that the result stays below it.
                base = network_bound.network_bytes
                mix = max((cap - base.max()) / (network_load.max() - base.max()), 0.0)
            max_load = float((load - network_load + mix * network_load + (1 - mix) * base).max())
            if max_load < best_load:
                best_load, best_network = max_load, network_load
            price = np.where(over_network, (load * price_factor)[ranks], load[ranks])
            min_price = np.minimum.reduceat(price, starts)
            # U: the busiest k ranks, for all k at once; V: other ranks with (almost) the same price.
            sorted_load = np.sort(load)
            size = _weight_from(load, np.ones(world), sorted_load)
            for margin in MARGINS:
                floor = sorted_load * (1 - margin)
                forced = _weight_from(min_price[~network], weight[~network], sorted_load)
                forced += _weight_from(min_price[network], weight[network], floor)
                forced -= cap * (_weight_from(load * price_factor, np.ones(world), floor) - size)
                forced /= size
                if forced.max() > best * (1 + 1e-9):
                    best, forced_on = float(forced.max()), np.flatnonzero(load >= sorted_load[forced.argmax()])
            if best_load <= best * 1.0005:
                break
            share = share / price ** (1.0 if number % 2 else 0.5)
            share *= np.repeat(weight / np.add.reduceat(share, starts), sizes)
            price_factor = np.maximum(price_factor * np.sqrt(network_load / cap), 1.0)
        return Busiest(best, best_load, tuple(forced_on.tolist()), best_network)


def _weight_from(values: NDArray[Any], weight: NDArray[Any], floor: NDArray[Any]) -> Floats:
    """Return, for each floor, the total weight of all values at or above it."""
    order = np.argsort(values)
    return np.append(np.cumsum(weight[order][::-1])[::-1], 0.0)[np.searchsorted(values[order], floor)]
