"""The fewest bytes that any plan can move, and the fewest that its busiest rank can: what the planner is judged by.

Computed apart from the planner and by another method, or it would prove nothing. Every HF tensor is cut into atoms at
all places where either side cuts it, so that a rank holds an atom whole or not at all, and two matrices of booleans,
`holds[rank, atom]` and `needs[rank, atom]`, say everything. Layers of one kind and experts with the same owners have
the same columns: these are written once and weighted.

**Bytes.** A rank has to receive what it needs and does not hold; a node, the union of what its ranks need without the
union of what they hold.

**The busiest rank.** Sending is a set of jobs: so many bytes, and the ranks that can do them. However they are shared
out, the ranks of a set S do at least the jobs that nobody outside of S can do, so one of them does at least
`bytes of those jobs / |S|`. That is a bound for any S, and the best S gives all that ownership forces. Tried are
single ranks, ranks that hold the same parts, stages, nodes, all ranks, and the sets that a fractional sharing of the
jobs finds busy; what that sharing comes to shows how much a better S could add. The jobs, of an atom and a node, where
the network carries no byte twice into a node:

- `nic_send`: the node needs and lacks it: one copy enters, from any rank that holds it. (Nodes do not relay to nodes.)
- `nic_recv`: that copy is received by one of the node's ranks that need it: nobody receives what it does not need.
- `send`, over all links: that copy again; and where k of the node's ranks need it, k - 1 copies inside of the node,
  which any of these k may send, since any may be the first to have it. Where the node does hold it and k others of its
  ranks need it, one copy can only come from the holders in the node, and k - 1 from them or from those that need it.
- `recv`, over all links: a rank's jobs are its own; the bound is the rank that lacks most.

**Both of a sender's figures at once.** Who has much to send inside of its node should send less over the network; then
others have to send more over it. Where nobody may send more than `cap` over the network, take two sets of ranks, U and
V, without a rank in common. The jobs inside of nodes that only U can do, and those over the network that only U and V
can do, are done by U and V. Of the latter, V does `cap` |V| at most, so that some rank of U sends at least

    (bytes of the former + bytes of the latter - cap |V|) / |U|    in all.

That, too, holds for any U and V. The best two give all that is forced: let the jobs flow to a rank through an edge of
capacity `cap` if they are over the network, and from the rank through one of capacity x; all jobs fit if and only if no
cut is smaller than they are, and a cut is such a U and V. `send_beside` is this bound with `cap` = SLACK times
`nic_send`: the least that the busiest rank sends in all in any plan whose figure for the network is at most SLACK.
`send` is the bound without a cap, V empty; a plan that comes closer to it than `send_beside` has a rank that sends more
than the cap over the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config import ConfigError
from megarl.models import blocks
from megarl.models.config_json import need
from megarl.models.fp8 import is_quantised
from megarl.models.layout_algebra import HFConfig, Param
from megarl.models.registry import family_of
from megarl.reshard.plan.layout import EngineLayout, RankMap, ShardSlice, TrainLayout, build_rank_map

Wire = Literal["bf16", "fp8", "fp32"]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BLOCK = 128  # rows and columns of an FP8 block; each has an fp32 scale
SCALE_BYTES = 4
NETWORK_SLACK = (
    1.05  # in the plans that `send_beside` bounds, no rank sends more than this times `nic_send` over the network
)
SHARING_ROUNDS = 400  # of the fractional sharing that suggests busy sets; more can only raise the bound a little
MARGINS = (0.0, 0.003, 0.01)  # what is as good as equal there, as it never becomes quite equal


@dataclass(frozen=True, eq=False)
class Bound:
    """All in bytes. `model_bytes`: the whole model once; `needed`, `local`, `cross`: of each rank; `internode`: of each
    node; the others: of the busiest rank, `send_beside` in the plans that keep to SLACK over the network. For those of
    senders and `nic_recv`, `attainable` is what a sharing of the jobs that was found comes to, and `forced_on` the
    ranks of the set that forces the bound."""

    model_bytes: int
    needed: Ints
    local: Ints
    cross: Ints
    internode: Ints
    send: float
    send_beside: float
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
    """Distinct columns of both matrices. `holds` is of the ranks of the stage that has the parameters, `needs` of the
    ranks of an engine; each stands for `weight` bytes."""

    holds: Bools
    needs: Bools
    weight: Ints


class LayerColumns(NamedTuple):
    """A layer of the decoder, or (None) what is outside of it, with the columns of its parameters."""

    stage: int
    layer: int | None
    columns: Columns


def compute_bound(
    hf: HFConfig, train: TrainLayout, engine: EngineLayout, ranks_per_node: int, wire: Wire = "bf16"
) -> Bound:
    """The bound of moving the whole model once, from the trainer's ranks to the engines', which are what the layouts
    say. Raises ConfigError where a layout does not divide the model or its ranks."""
    sides = build_rank_map(train, engine, ranks_per_node)
    world, width, here = sides.world, train.stage_ranks, sides.ranks_per_node
    needed, local = np.zeros(world, np.int64), np.zeros(world, np.int64)
    internode = np.zeros(world // here, np.int64)
    nic_send, nic_recv, send = TransferJobs(), TransferJobs(), TransferJobs()
    model = list_layer_columns(hf, train, engine, wire)
    for stage in sorted({member.stage for member in model}):
        columns = _merged([member.columns for member in model if member.stage == stage])
        holds, needs = expand_to_ranks(columns, stage, train, engine, sides)
        weight = columns.weight
        needed += needs @ weight
        local += (needs & holds) @ weight
        held, lacks = (m.reshape(len(internode), here, -1) for m in (holds, needs & ~holds))
        copies, node_holds = lacks.sum(1), held.any(1)
        enters = (copies > 0) & ~node_holds
        internode += enters @ weight
        stage_ranks = sides.train[stage * width : (stage + 1) * width]
        first, last = int(stage_ranks.min()), int(stage_ranks.max())
        owners = np.full(len(weight), first), holds[first : last + 1].T, weight * enters.sum(0)
        nic_send.add(*owners, network=True)
        send.add(*owners, network=True)

        node, atom = np.nonzero(enters)
        takers = node * here, lacks[node, :, atom]
        nic_recv.add(*takers, weight[atom], network=True)
        send.add(*takers, weight[atom] * (copies[node, atom] - 1), network=False)
        node, atom = np.nonzero((copies > 0) & node_holds)
        send.add(node * here, held[node, :, atom], weight[atom], network=False)
        send.add(node * here, (held | lacks)[node, :, atom], weight[atom] * (copies[node, atom] - 1), network=False)
    classes = _partition_ranks(train, sides)
    found = {
        name: jobs.bound_busiest(world, classes) for name, jobs in (("nic_send", nic_send), ("nic_recv", nic_recv))
    }
    found["send"] = send.bound_busiest(world, classes)
    found["send_beside"] = send.bound_busiest(world, classes, found["nic_send"]) if nic_send.bytes else found["send"]
    return Bound(
        model_bytes=sum(int(member.columns.weight.sum()) for member in model),
        needed=needed,
        local=local,
        cross=needed - local,
        internode=internode,
        send=found["send"].lower_bound,
        send_beside=max(found["send"].lower_bound, found["send_beside"].lower_bound),
        recv=float((needed - local).max()),
        nic_send=found["nic_send"].lower_bound,
        nic_recv=found["nic_recv"].lower_bound,
        attainable={name: busiest.attainable for name, busiest in found.items()},
        forced_on={name: busiest.forced_on for name, busiest in found.items()},
    )


def list_layer_columns(hf: HFConfig, train: TrainLayout, engine: EngineLayout, wire: Wire) -> list[LayerColumns]:
    """The whole model: embedding, layers, those of multi-token prediction (outside of the decoder), norm and head."""
    family = family_of(hf)
    family.check(hf)
    experts = family.num_experts(hf)
    if experts % train.ep:
        sizes = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ConfigError(f"ep={train.ep} does not divide the {experts} experts of a layer; sizes that do: {sizes}")
    found = []
    for param in blocks.embedding(hf) + blocks.final_params(hf):
        found.append(LayerColumns(train.stage_of(param), None, _columns([param], train, engine, experts, wire)))
    kinds: dict[Any, Columns] = {}
    decoder = int(need(hf, "num_hidden_layers"))
    for layer in range(decoder + family.num_mtp_layers(hf)):
        sample = family.layer(hf, layer, range(min(1, experts)))
        kind = (*(_param_signature(param, engine) for param in sample), engine.experts.get(layer))
        if kind not in kinds:
            kinds[kind] = _columns(family.layer(hf, layer, range(experts)), train, engine, experts, wire)
        found.append(LayerColumns(train.stage_of(sample[0]), layer if layer < decoder else None, kinds[kind]))
    return found


def expand_to_ranks(
    columns: Columns, stage: int, train: TrainLayout, engine: EngineLayout, sides: RankMap
) -> tuple[Bools, Bools]:
    """`holds` and `needs` of all ranks of the job, for parameters of this stage."""
    holds, needs = np.zeros((2, sides.world, len(columns.weight)), bool)
    needs[sides.engine] = np.tile(columns.needs, (len(sides.engine) // engine.tp, 1))
    holds[sides.train[stage * train.stage_ranks : (stage + 1) * train.stage_ranks]] = columns.holds
    return holds, needs


def bytes_per_element(param: Param, wire: Wire) -> int:
    """Of a weight on the wire, scales apart."""
    if wire == "fp8" and is_quantised(param):
        return 1
    return 4 if wire == "fp32" or (param.dtype is not None and param.dtype.itemsize == 4) else 2


def _param_signature(param: Param, engine: EngineLayout) -> Any:
    """What makes two parameters the same but for their names and experts."""
    slot = engine.slot_of(param)
    shapes = tuple(tensor.shape for tensor in param.hf)
    cuts = param.sharding, slot and (slot.sharding, slot.grid)
    return shapes, cuts, param.expert is None, param.dtype, is_quantised(param)


def _columns(params: Iterable[Param], train: TrainLayout, engine: EngineLayout, experts: int, wire: Wire) -> Columns:
    """The columns of parameters that are on the same stage."""
    alike: dict[Any, tuple[Param, Bools, Bools, int]] = {}
    for param in params:
        if engine.slot_of(param) is None:
            continue
        first = train.stage_of(param) * train.stage_ranks
        owns = np.array([train.has_param(first + rank, param, experts) for rank in range(train.stage_ranks)])
        wants = np.array([bool(engine.expert_indices(rank, param, experts)) for rank in range(engine.tp)])
        key = (_param_signature(param, engine), owns.tobytes(), wants.tobytes())
        alike[key] = (param, owns, wants, alike[key][3] + 1 if key in alike else 1)
    found = []
    for param, owns, wants, count in alike.values():
        holds = [train.slices_of_rank(rank, param) if owned else [] for rank, owned in enumerate(owns)]
        needs = [engine.slices_of_rank(rank, param) if wanted else [] for rank, wanted in enumerate(wants)]
        quantised = wire == "fp8" and is_quantised(param)
        for source, tensor in enumerate(param.hf):
            shape = (*tensor.shape, 1)[:2]
            boxes = [[_box(part, shape) for part in parts if part.source == source] for parts in [*holds, *needs]]
            member, cells = _atoms(boxes, shape)
            found.append((member, cells * bytes_per_element(param, wire) * count))
            if quantised:
                # Whoever holds a cell of a block has its scale: a block is quantised before it is cut.
                grid = [[[(a // BLOCK, -(-b // BLOCK)) for a, b in box] for box in rank] for rank in boxes]
                member, cells = _atoms(grid, [-(-n // BLOCK) for n in shape])
                found.append((member, cells * SCALE_BYTES * count))
    matrix = np.concatenate([np.zeros((train.stage_ranks + engine.tp, 0), bool), *(m for m, _ in found)], axis=1)
    weight = np.concatenate([np.zeros(0, np.int64), *(w for _, w in found)])
    return _merged([Columns(matrix[: train.stage_ranks], matrix[train.stage_ranks :], weight)])


def _box(held: ShardSlice, shape: Sequence[int]) -> list[tuple[int, int]]:
    box = [(0, shape[0]), (0, shape[1])]
    box[held.dim] = (held.start, held.stop)
    return box


def _atoms(boxes: Sequence[Sequence[Sequence[tuple[int, int]]]], shape: Sequence[int]) -> tuple[Bools, Ints]:
    """Which atoms the boxes of each rank cover, and how many cells each atom has."""
    different: dict[tuple[Any, ...], int] = {}
    kind = [different.setdefault(tuple(map(tuple, rank)), len(different)) for rank in boxes]
    edges = []
    for dim in (0, 1):
        places = {at for rank in different for box in rank for at in box[dim]}
        edges.append(np.array(sorted(places | {0, shape[dim]})))
    member = np.zeros((len(different), len(edges[0]) - 1, len(edges[1]) - 1), bool)
    for index, rank in enumerate(different):
        for box in rank:
            (r0, r1), (c0, c1) = (np.searchsorted(edges[dim], box[dim]) for dim in (0, 1))
            member[index, r0:r1, c0:c1] = True
    cells = np.diff(edges[0])[:, None] * np.diff(edges[1])
    return member.reshape(len(different), -1)[kind], cells.ravel()


def _merged(parts: Sequence[Columns]) -> Columns:
    """The same with equal columns made one, without those that nobody needs."""
    holds, needs, weight = (np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True))
    wanted = needs.any(0)
    if not holds[:, wanted].any(0).all():
        raise ConfigError("an engine needs weights that no rank of the trainer holds; check stages, ep and the table")
    packed = np.packbits(np.concatenate([holds, needs])[:, wanted], axis=0).T
    _, first, same = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    total = np.zeros(len(first), np.int64)
    np.add.at(total, same.ravel(), weight[wanted])
    kept = np.flatnonzero(wanted)[first]
    return Columns(holds[:, kept], needs[:, kept], total)


def _partition_ranks(train: TrainLayout, sides: RankMap) -> list[Ints]:
    """The natural ways to divide the ranks into sets: for each, the number of the set that every rank is in."""
    stage, within = np.divmod(np.arange(train.world), train.stage_ranks)
    of_trainer = [
        np.arange(train.world),
        stage * train.tp + within % train.tp,
        stage * train.ep * train.etp + within % (train.ep * train.etp),
        stage,
    ]
    node = np.arange(sides.world) // sides.ranks_per_node
    found = np.full((len(of_trainer), sides.world), -1)  # those that do not train are a set of their own
    found[:, sides.train] = of_trainer
    # Where the sides differ: who is on both, on one, on none, in each node and in all.
    side = np.isin(np.arange(sides.world), sides.train) + 2 * np.isin(np.arange(sides.world), sides.engine)
    differ = [np.arange(sides.world), side, 4 * node + side] if side.min() < 3 else []
    labels = [*found, node, np.zeros_like(node), *differ]
    return [np.unique(label, return_inverse=True)[1].ravel() for label in labels]


class Busiest(NamedTuple):
    """What some rank has to do at least, what the busiest does in a sharing that was found, and the set of ranks that
    forces the former. network [world]: what each sends over the network in that sharing."""

    lower_bound: float
    attainable: float
    forced_on: tuple[int, ...]
    network_bytes: Floats


class TransferJobs:
    """Bytes that have to be moved, over the network or inside of a node, by the set of ranks any of which can do it."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[bool, int, int, bytes], int] = {}

    def add(self, first: Ints, able: Bools, weight: Ints, network: bool) -> None:
        """For each job the ranks that can do it, a row of `able` that begins with rank `first`, and its bytes."""
        rows, width = np.flatnonzero(weight), able.shape[1]
        packed = np.packbits(able[rows], axis=1)
        key = np.concatenate([first[rows, None].astype("<i8").view(np.uint8).reshape(len(rows), 8), packed], axis=1)
        if not len(rows):
            return
        different, same = np.unique(key, axis=0, return_inverse=True)
        total = np.zeros(len(different), np.int64)
        np.add.at(total, same.ravel(), weight[rows])
        for row, bytes_ in zip(different, total.tolist(), strict=True):
            begin = int(row[:8].view("<i8")[0])
            at = (network, begin, width, row[8:].tobytes())
            self.bytes[at] = self.bytes.get(at, 0) + bytes_

    def bound_busiest(self, world: int, classes: Sequence[Ints], within: Busiest | None = None) -> Busiest:
        """`classes`: see `_partition_ranks`. within: of the same jobs over the network alone; then the bound is of sharings in
        which no rank sends more than SLACK times `within.least` over the network."""
        if not self.bytes:
            return Busiest(0.0, 0.0, (), np.zeros(world))
        members = [
            begin + np.flatnonzero(np.unpackbits(np.frombuffer(able, np.uint8), count=width))
            for _, begin, width, able in self.bytes
        ]
        weight = np.array(list(self.bytes.values()), np.float64)
        network = np.array([far for far, *_ in self.bytes])
        sizes = np.array([len(ranks) for ranks in members])
        starts, ranks = np.cumsum(sizes) - sizes, np.concatenate(members)
        best, forced_on = 0.0, np.zeros(0, np.int64)
        for label in classes:
            low, high = np.minimum.reduceat(label[ranks], starts), np.maximum.reduceat(label[ranks], starts)
            inside = low == high
            forced = np.bincount(low[inside], weight[inside], minlength=label.max() + 1) / np.bincount(label)
            if forced.max() > best:
                best, forced_on = float(forced.max()), np.flatnonzero(label == forced.argmax())
        cap = NETWORK_SLACK * within.lower_bound if within else weight.sum()
        far = np.repeat(network, sizes)
        share = np.repeat(weight / sizes, sizes)
        dear = np.ones(world)  # the factor by which a rank that is at the cap is dearer for jobs over the network
        found, sent = np.inf, np.zeros(world)
        for number in range(SHARING_ROUNDS):
            load = np.bincount(ranks, share, minlength=world)
            out: NDArray[Any] = np.bincount(ranks[far], share[far], minlength=world)
            part, base = 1.0, out
            if within and out.max() > cap:  # mixed with a sharing that keeps to it, so that it does, too
                base = within.network_bytes
                part = max((cap - base.max()) / (out.max() - base.max()), 0.0)
            attained = float((load - out + part * out + (1 - part) * base).max())
            if attained < found:
                found, sent = attained, out
            price = np.where(far, (load * dear)[ranks], load[ranks])
            least = np.minimum.reduceat(price, starts)
            # U: the busiest k ranks, for every k at once; V: other ranks that cost (almost) as much.
            rising = np.sort(load)
            size = _weight_from(load, np.ones(world), rising)
            for margin in MARGINS:
                floor = rising * (1 - margin)
                forced = _weight_from(least[~network], weight[~network], rising)
                forced += _weight_from(least[network], weight[network], floor)
                forced -= cap * (_weight_from(load * dear, np.ones(world), floor) - size)
                forced /= size
                if forced.max() > best * (1 + 1e-9):
                    best, forced_on = float(forced.max()), np.flatnonzero(load >= rising[forced.argmax()])
            if found <= best * 1.0005:
                break
            share = share / price ** (1.0 if number % 2 else 0.5)
            share *= np.repeat(weight / np.add.reduceat(share, starts), sizes)
            dear = np.maximum(dear * np.sqrt(out / cap), 1.0)
        return Busiest(best, found, tuple(forced_on.tolist()), sent)


def _weight_from(values: NDArray[Any], weight: NDArray[Any], floor: NDArray[Any]) -> Floats:
    """The weight of all values from each floor on."""
    order = np.argsort(values)
    return np.append(np.cumsum(weight[order][::-1])[::-1], 0.0)[np.searchsorted(values[order], floor)]
