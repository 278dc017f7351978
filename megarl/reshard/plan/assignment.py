"""Decide who sends what to whom: exactly what a rank needs and lacks, from the least busy owners.

Every rank computes the same assignment from the configuration alone, in integers, without communication. What several
ranks of a node need enters the node once, in parts, one part at each of these ranks (its entries), which forward the
parts to each other. Layers of the same kind on a stage are assigned alike, so each of them is balanced by itself.
`deal` and `balance` split bytes over ranks such that the busiest rank has as little as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megarl.config import ConfigError
from megarl.models.layout_algebra import HFConfig
from megarl.reshard.plan.flows import ByteIndex, LayerKind, Wire, build_byte_index, list_layer_kinds
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, build_rank_map

SWEEPS, SWEEP_TOLERANCE = 12, 1e-3
"""`balance` takes its sets in turn so often at most, or until none changes by this part of the busiest rank's load."""
NETWORK_LIMIT, NETWORK_TOLERANCE = 1.043, 0.002
GOOD_ENOUGH, TRIES = 1.005, 5
"""Of `distribute_network`: how far what goes over the network may rise above its level, and how exactly that is kept; which
factor is as good as one; how often to try."""

RankSets = list[tuple[np.ndarray, int]]
"""Ranks that may take a share of so many bytes, and these bytes."""


class Shares(NamedTuple):
    """Bytes [lo, hi) of the line, of the given unit number `origin`, dealt to `rank`; arrays."""

    lo: np.ndarray
    hi: np.ndarray
    unit: np.ndarray
    rank: np.ndarray


def group_units(
    keys: np.ndarray, weight: np.ndarray, ranks_of: Callable[[np.ndarray], np.ndarray]
) -> tuple[list[np.ndarray], RankSets]:
    """Units with equal keys, which are dealt out among the same ranks: their numbers, and the set; by rising key.

    keys [N, K]; weight [N]: bytes; ranks_of(key): the ranks.
    """
    if not len(keys):
        return [], []
    order = np.lexsort(keys.T[::-1])
    rising = keys[order]
    starts = np.concatenate([[0], np.nonzero((rising[1:] != rising[:-1]).any(axis=1))[0] + 1])
    totals = np.add.reduceat(weight[order], starts).tolist()
    sets = [(ranks_of(rising[at]), total) for at, total in zip(starts, totals, strict=True)]
    return np.split(order, starts[1:]), sets


def cut_by_shares(
    line: ByteIndex,
    lo: np.ndarray,
    hi: np.ndarray,
    times: np.ndarray,
    members: Sequence[np.ndarray],
    sets: RankSets,
    shares: Sequence[np.ndarray],
) -> Shares:
    """Cut units [lo, hi), which weigh `times` their bytes, where one rank's share ends and the next one's begins."""
    found = [Shares(*(np.zeros(0, dtype=np.int64),) * 4)]
    for units, (ranks, _), share in zip(members, sets, shares, strict=True):
        if len(ranks) == 1:
            found.append(Shares(lo[units], hi[units], units, np.full(len(units), ranks[0])))
        else:
            begin, end, unit, owner = _cut_units(line, lo[units], hi[units], times[units], share)
            found.append(Shares(begin, end, units[unit], ranks[owner]))
    return Shares(*map(np.concatenate, zip(*found, strict=True)))


def distribute(sets: RankSets, load: np.ndarray) -> list[np.ndarray]:
    """Each set's bytes among its ranks, so that the busiest is as idle as can be. load [world]: what each has so far;
    counts up. Sets with few ranks should come first, for they have the least choice."""
    shares = []
    for ranks, total in sets:
        share = _water_fill(load[ranks], total) if len(ranks) > 1 else np.array([total])
        load[ranks] += share
        shares.append(share)
    return shares


def balance(sets: RankSets, load: np.ndarray) -> list[np.ndarray]:
    """`deal`, and then each set in turn again until nothing changes, or SWEEPS times: then no other sharing has a less
    busy busiest rank, however the sets overlap. (Each turn lowers the sum of the squares of all loads; where that is
    least, so is the busiest rank's load.)"""
    shares = distribute(sets, load)
    several = [number for number, (ranks, _) in enumerate(sets) if len(ranks) > 1]
    for _ in range(SWEEPS if len(several) > 1 else 0):
        most = 0
        for number in several:
            ranks, total = sets[number]
            rest = load[ranks] - shares[number]
            share = _water_fill(rest, total)
            most = max(most, int(np.abs(share - shares[number]).max()))
            load[ranks] = rest + share
            shares[number] = share
        if most <= SWEEP_TOLERANCE * load.max():
            break
    return shares


def distribute_forwarded(sets: RankSets, sent: np.ndarray, room: np.ndarray) -> list[np.ndarray]:
    """`deal` of what the ranks of a set receive in parts and send to each other, so that the busiest sender is as idle
    as can be. sent [world]: what each sends besides; counts up. room [world]: what each may receive, as far as that is
    enough for all; counts down."""
    shares = []
    for ranks, total in sets:
        others = len(ranks) - 1
        share = _water_fill_capped(sent[ranks] // others, total, room[ranks]) if others else np.array([total])
        if others:
            sent[ranks] += share * others
            room[ranks] -= share
        shares.append(share)
    return shares


def distribute_network(sets: RankSets, near: np.ndarray) -> list[np.ndarray]:
    """`deal` of what goes over the network, with a view to what each rank sends inside of its node besides.

    Two figures are to be low: what the busiest rank sends over the network, and what it sends in all. Each alone comes
    down to a level, often not both at once. Ranks are dealt to as if they had sent `near` - free already: with `free`
    as high as any, nothing, that levels the network; with `free` = 0 all of it, that levels the sum. Between these that
    `free` is looked for with which both figures are the same factor above their levels. If that factor is more than
    NETWORK, the one with which the network's is NETWORK: it is the slower link, and what a push waits for.
    """

    def dealt(free: int) -> tuple[list[np.ndarray], int, int]:
        handicap = np.maximum(near - free, 0)
        load = handicap.copy()
        shares = distribute(sets, load)
        return shares, int((load - handicap).max()), int((load - handicap + near).max())

    low, high = 0, int(near.max())
    best, far, most = dealt(high)
    if most == far:
        return best
    shares, network, whole = dealt(low)
    least = most / whole
    if network <= GOOD_ENOUGH * far or least <= GOOD_ENOUGH:
        return best if least <= GOOD_ENOUGH else shares
    # How much too high the network's factor is, at the low and at the high end.
    wrong = [network / far - 1, 1 - min(least, NETWORK_LIMIT)]
    for _ in range(TRIES):
        free = low + int((high - low) * wrong[0] / (wrong[0] - wrong[1]))
        shares, network, most = dealt(free)
        factors = network / far, most / whole
        if factors[0] <= NETWORK_LIMIT + NETWORK_TOLERANCE and max(factors) < least:
            best, least = shares, max(factors)
        off = factors[0] - min(factors[1], NETWORK_LIMIT)
        if abs(off) <= NETWORK_TOLERANCE:
            break
        if off > 0:  # the other end counts half, or it might stay for ever
            low, wrong = free, [off, wrong[1] / 2]
        else:
            high, wrong = free, [wrong[0] / 2, off]
    return best


def _water_fill_capped(load: np.ndarray, total: int, room: np.ndarray) -> np.ndarray:
    """`_water_fill` with no share above `room`. What that leaves goes out in equal parts."""
    room = np.maximum(room, 0)
    if total >= room.sum():
        return room + _water_fill(np.zeros_like(load), total - int(room.sum()))
    share = _water_fill(load, total)
    full = np.zeros(len(load), dtype=bool)
    while (share > room).any():
        full |= share >= room
        share = np.where(full, room, 0)
        share[~full] = _water_fill(load[~full], total - int(share.sum()))
    return share


def _water_fill(load: np.ndarray, total: int) -> np.ndarray:
    """How much each gets of `total` so that the highest of load + share is as low as can be; whole numbers."""
    rising = load.copy()
    rising.sort()
    # With the lowest n filled up to one level, this is the level; right is the last n whose members all lie below it.
    level = (total + rising.cumsum()) // np.arange(1, len(load) + 1)
    share = np.maximum(level[np.count_nonzero(level >= rising) - 1] - load, 0)
    share[load.argmin()] += total - share.sum()
    return share


def _cut_units(
    line: ByteIndex, lo: np.ndarray, hi: np.ndarray, times: np.ndarray, share: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lay the units behind one another and the shares along them -> lo, hi, which unit, whose share."""
    ends = np.cumsum((hi - lo) * times)
    begins = ends - (hi - lo) * times
    borders = np.cumsum(share)
    points = np.unique(np.concatenate([[0], ends, borders]))
    left, right = points[:-1], points[1:]
    unit = np.searchsorted(ends, left, side="right")
    owner = np.minimum(np.searchsorted(borders, left, side="right"), len(share) - 1)

    def place(point: np.ndarray) -> np.ndarray:
        exact = lo[unit] + (point - begins[unit]) // times[unit]
        inner = np.maximum(line.snap_to_cut(exact), lo[unit])
        return np.where(point == begins[unit], lo[unit], np.where(point == ends[unit], hi[unit], inner))

    begin, end = place(left), place(right)
    full = end > begin
    return begin[full], end[full], unit[full], owner[full]


MIN_PIECE = 64 << 10
"""Bytes below which a part of a tensor is not cut any more."""


class Entries(NamedTuple):
    """Bytes [lo, hi) of the line that go from `src` to `dst`, a rank of a node that needs them. Arrays, in one order.

    group: number of (stage, kind); this happens for each of its layers. takers: the ranks of dst's node that need them
    and lack them, dst among them, as bits, the node's first rank being bit 0; dst forwards to the others.
    """

    lo: np.ndarray
    hi: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    layer_group: np.ndarray
    receivers: np.ndarray


class NodeDemands(NamedTuple):
    """Bytes [lo, hi) of the line that ranks of a node need and lack; arrays.

    group: see `Entries`. takers: these ranks, near: those of the node that hold them, both as bits. owners: number of
    the set of ranks that hold them, counted within the stage.
    """

    lo: np.ndarray
    hi: np.ndarray
    layer_group: np.ndarray
    node: np.ndarray
    receivers: np.ndarray
    local_holders: np.ndarray
    holder_set: np.ndarray

    def select(self, chosen: np.ndarray) -> NodeDemands:
        return NodeDemands(*(column[chosen] for column in self))


class LayerGroup(NamedTuple):
    """The layers of a kind on a stage."""

    stage: int
    kind: int
    layers: tuple[int | None, ...]


class Transfers(NamedTuple):
    """Every transfer of a whole push, between any two ranks; arrays."""

    src: np.ndarray
    dst: np.ndarray
    nbytes: np.ndarray


class Assignment:
    """The plan of all ranks, before it is cut into rounds.

    hf: the model. ranks_per_node: rank r is on node r // ranks_per_node. min_piece: see `MIN_PIECE`. Raises ConfigError
    where a layout does not divide the model, or its ranks.
    """

    def __init__(
        self,
        hf: HFConfig,
        train: TrainLayout,
        engine: EngineLayout,
        ranks_per_node: int,
        wire: Wire = "bf16",
        min_piece: int = MIN_PIECE,
    ) -> None:
        self.hf, self.train, self.engine, self.wire = hf, train, engine, wire
        self.rank_map = build_rank_map(train, engine, ranks_per_node)
        self.world, self.ranks_per_node = self.rank_map.world, self.rank_map.ranks_per_node
        if self.ranks_per_node > 63:
            raise ConfigError(f"a node of {self.ranks_per_node} ranks: plans are made for 63 at the most")
        self.layer_kinds: list[LayerKind] = list_layer_kinds(hf, train, engine, wire, min_piece)
        self.byte_index: ByteIndex = build_byte_index(self.layer_kinds)
        self.layer_groups = self._build_layer_groups()
        self.entries = self._assign()

    def _build_layer_groups(self) -> list[LayerGroup]:
        found: dict[tuple[int, int], list[int | None]] = {}
        for number, kind in enumerate(self.layer_kinds):
            for stage, layer in kind.layers:
                found.setdefault((stage, number), []).append(layer)
        return [LayerGroup(stage, kind, tuple(layers)) for (stage, kind), layers in sorted(found.items())]

    def needs_matrix(self, kind: int) -> np.ndarray:
        """[flows of the kind, world] bool."""
        flows = self.layer_kinds[kind].cell_groups
        of_engine = np.zeros((len(flows), self.engine.tp), dtype=bool)
        for row, flow in zip(of_engine, flows, strict=True):
            row[list(flow.engine_positions)] = True
        needs = np.zeros((len(flows), self.world), dtype=bool)
        needs[:, self.rank_map.engine] = np.tile(of_engine, len(self.rank_map.engine) // self.engine.tp)
        return needs

    def ranks_on_stage(self, stage: int) -> np.ndarray:
        """[ranks of a stage]: the job's numbers of the ranks that have it."""
        width = self.train.stage_ranks
        return self.rank_map.train[stage * width : (stage + 1) * width]

    def holds_matrix(self, kind: int) -> np.ndarray:
        """[flows of the kind, ranks of a stage] bool; the same on each stage that has the kind."""
        train = self.train
        local = np.arange(train.stage_ranks)
        ep_rank = local // train.etp % train.ep
        found = np.zeros((len(self.layer_kinds[kind].cell_groups), train.stage_ranks), dtype=bool)
        for row, flow in zip(found, self.layer_kinds[kind].cell_groups, strict=True):
            if flow.ep_rank is None:
                row[:] = np.isin(local % train.tp, flow.train_shards)
            else:
                row[:] = np.isin(local % train.etp, flow.train_shards) & (ep_rank == flow.ep_rank)
        return found

    @cached_property
    def matrices(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """`needs` and `holds` of each kind."""
        return [(self.needs_matrix(kind), self.holds_matrix(kind)) for kind in range(len(self.layer_kinds))]

    @cached_property
    def first_cell_group(self) -> np.ndarray:
        """Number on the line of each kind's first flow."""
        return np.concatenate([[0], np.cumsum([len(kind.cell_groups) for kind in self.layer_kinds])])

    def _assign(self) -> Entries:
        wants, owners = self._collect_demands()
        far, inside = wants.select(wants.local_holders == 0), wants.select(wants.local_holders > 0)
        # What each would send if nothing that comes over the network were forwarded; then who gets and forwards that.
        sent, over = np.zeros((2, self.world), dtype=np.int64)
        self._distribute_copies(inside, sent)
        _, sets = self._group_by_holders(far, owners)
        for (ranks, _), share in zip(sets, distribute_network(sets, sent.copy()), strict=True):
            over[ranks] += share
        far, far_dst = self._assign_entry_ranks(far, sent + over)
        forwarded = self._forwarded_bytes(far, far_dst)
        # Where all ranks are on both sides, they have about as much to send over the network; elsewhere who has more of
        # that than others sends less inside of its node.
        besides = np.zeros_like(over) if self.rank_map.is_colocated else over
        inside, dst = self._assign_copy_ranks(inside, forwarded + besides)
        # Senders: inside of the node those of its ranks that have it, else all that have it.
        sent = forwarded + self._forwarded_bytes(inside, dst) + besides
        members, sets = self._group_in_node(inside, inside.local_holders, self._count_bytes(inside))
        inside, again, src = self._cut_demands(inside, members, sets, balance(sets, sent))
        sent -= besides
        members, sets = self._group_by_holders(far, owners)
        far, far_again, far_src = self._cut_demands(far, members, sets, distribute_network(sets, sent))
        both = NodeDemands(*map(np.concatenate, zip(inside, far, strict=True)))
        src, dst = np.concatenate([src, far_src]), np.concatenate([dst[again], far_dst[far_again]])
        order = np.lexsort((both.lo, src, dst, both.layer_group))
        found = Entries(both.lo, both.hi, src, dst, both.layer_group, both.receivers)
        return Entries(*(column[order] for column in found))

    def _collect_demands(self) -> tuple[NodeDemands, list[np.ndarray]]:
        """All that any node lacks; and the sets of ranks within a stage that `NodeDemands.holder_set` counts."""
        here, world = self.ranks_per_node, self.world
        bits = 1 << np.arange(here, dtype=np.int64)
        patterns: dict[bytes, int] = {}
        members: list[np.ndarray] = []
        found = []
        for number, group in enumerate(self.layer_groups):
            needs, holds = self.matrices[group.kind]
            own = self.ranks_on_stage(group.stage)
            lacking = needs.copy()
            lacking[:, own] &= ~holds
            takers = lacking.reshape(len(needs), -1, here) @ bits
            flow, node = np.nonzero(takers)
            everywhere = np.zeros((len(needs), world), dtype=bool)
            everywhere[:, own] = holds
            near = everywhere.reshape(len(needs), -1, here) @ bits
            pattern = np.empty(len(holds), dtype=np.int64)
            for row, held in enumerate(holds):
                key = held.tobytes()
                if key not in patterns:
                    patterns[key] = len(members)
                    members.append(np.nonzero(held)[0])
                pattern[row] = patterns[key]
            start = self.byte_index.cell_group_start
            at = flow + self.first_cell_group[group.kind]
            who = takers[flow, node], near[flow, node], pattern[flow]
            found.append(NodeDemands(start[at], start[at + 1], np.full(len(flow), number), node, *who))
        return NodeDemands(*map(np.concatenate, zip(*found, strict=True))), members

    @cached_property
    def _layer_counts(self) -> np.ndarray:
        """Layers of each group."""
        return np.array([len(group.layers) for group in self.layer_groups])

    def _count_bytes(self, wants: NodeDemands) -> np.ndarray:
        """Bytes, of all layers."""
        return (wants.hi - wants.lo) * self._layer_counts[wants.layer_group]

    def _group_by_holders(self, far: NodeDemands, owners: list[np.ndarray]) -> tuple[list[np.ndarray], RankSets]:
        """To be dealt out among all that hold it: see `gather`."""
        count, stage = (
            np.array([len(ranks) for ranks in owners]),
            np.array([group.stage for group in self.layer_groups]),
        )
        keys = np.stack([count[far.holder_set], stage[far.layer_group], far.holder_set], axis=1)
        return group_units(
            keys, self._count_bytes(far), lambda key: self.ranks_on_stage(int(key[1]))[owners[int(key[2])]]
        )

    def _group_in_node(
        self, wants: NodeDemands, able: np.ndarray, weight: np.ndarray
    ) -> tuple[list[np.ndarray], RankSets]:
        """To be dealt out among the ranks of each one's node that `able` has as bits: see `gather`."""
        here = self.ranks_per_node
        keys = np.stack([_count_bits(able), wants.node, able], axis=1)
        return group_units(keys, weight, lambda key: int(key[1]) * here + _bit_positions(int(key[2])))

    def _cut_demands(
        self,
        wants: NodeDemands,
        members: list[np.ndarray],
        sets: RankSets,
        shares: list[np.ndarray],
        copies: bool = False,
    ) -> tuple[NodeDemands, np.ndarray, np.ndarray]:
        """The wants, cut; which of the given ones each was; and the rank that it was dealt to. copies: what was dealt
        out were all copies but the first."""
        times = self._layer_counts[wants.layer_group] * (_count_bits(wants.receivers) - 1 if copies else 1)
        found = cut_by_shares(self.byte_index, wants.lo, wants.hi, times, members, sets, shares)
        cut = wants.select(found.unit)._replace(lo=found.lo, hi=found.hi)
        return cut, found.unit, found.rank

    def _forwarded_bytes(self, wants: NodeDemands, dst: np.ndarray) -> np.ndarray:
        """[world] bytes that each rank forwards of what it receives."""
        weight = self._count_bytes(wants) * (_count_bits(wants.receivers) - 1)
        return np.bincount(dst, weight, self.world).astype(np.int64)

    def _assign_entry_ranks(self, far: NodeDemands, sent: np.ndarray) -> tuple[NodeDemands, np.ndarray]:
        """The ranks of a node that need it share what comes in: cut, and the rank of each. Who gets more of it forwards
        more, so those get it that send least besides (`sent` [world]; counts up), but nobody so much that it receives
        more over the network than the busiest rank has to anyway."""
        here, world = self.ranks_per_node, self.world
        weight, single = self._count_bytes(far), _count_bits(far.receivers) == 1
        received = np.bincount(far.node[single] * here + _lowest(far.receivers[single]), weight[single], world)
        shared = np.bincount(far.node[~single], weight[~single], world // here)
        able = np.bincount(self.rank_map.engine // here, minlength=world // here)  # ranks of a node that need anything
        most = max(received.max(), ((received.reshape(-1, here).sum(axis=1) + shared) // np.maximum(able, 1)).max())
        members, sets = self._group_in_node(far, far.receivers, weight)
        far, _, dst = self._cut_demands(
            far, members, sets, distribute_forwarded(sets, sent, (most - received).astype(np.int64))
        )
        return far, dst

    def _distribute_copies(
        self, inside: NodeDemands, sent: np.ndarray
    ) -> tuple[list[np.ndarray], RankSets, list[np.ndarray]]:
        """Of what a node has and others of its ranks need, one copy comes from a holder, the rest from holders or from
        those that got one: this rest, as it is gathered and dealt. Of what one rank needs, no rest, dealt to that rank.
        sent [world]: what each sends besides; counts up."""
        copies = _count_bits(inside.receivers) - 1
        _, first = self._group_in_node(inside, inside.local_holders, self._count_bytes(inside))
        able = inside.receivers | np.where(copies > 0, inside.local_holders, 0)
        members, sets = self._group_in_node(inside, able, self._count_bytes(inside) * copies)
        return members, sets, balance(first + sets, sent)[len(first) :]

    def _assign_copy_ranks(self, inside: NodeDemands, sent: np.ndarray) -> tuple[NodeDemands, np.ndarray]:
        """What a node has: cut, and the rank that is to receive each. Who makes copies of what it gets forwards them to
        the others; a holder that makes copies sends them, each an entry of its own."""
        here = self.ranks_per_node
        inside, _, rank = self._cut_demands(inside, *self._distribute_copies(inside, sent), copies=True)
        bit = 1 << rank % here
        forwards = inside.receivers & bit > 0
        found, dst = [inside.select(forwards)], [rank[forwards]]
        for place in range(here):
            takes = ~forwards & (inside.receivers >> place & 1 == 1)
            one = inside.select(takes)
            found.append(one._replace(receivers=np.full(len(one.lo), 1 << place), local_holders=bit[takes]))
            dst.append(one.node * here + place)
        return NodeDemands(*map(np.concatenate, zip(*found, strict=True))), np.concatenate(dst)

    def list_transfers(self) -> Transfers:
        """Every transfer of a whole push, entries and forwards, all layers together."""
        entries = self.entries
        times = np.array([len(group.layers) for group in self.layer_groups])[entries.layer_group]
        size = (entries.hi - entries.lo) * times
        src, dst, nbytes = [entries.src], [entries.dst], [size]
        for bit in range(self.ranks_per_node):
            taker = entries.dst // self.ranks_per_node * self.ranks_per_node + bit
            takes = (entries.receivers >> bit & 1 == 1) & (taker != entries.dst)
            src.append(entries.dst[takes])
            dst.append(taker[takes])
            nbytes.append(size[takes])
        return Transfers(np.concatenate(src), np.concatenate(dst), np.concatenate(nbytes))


def _count_bits(mask: np.ndarray) -> np.ndarray:
    return (
        np.unpackbits(mask.astype(np.int64).view(np.uint8).reshape(len(mask), 8), axis=1).sum(axis=1).astype(np.int64)
    )


def _lowest(mask: np.ndarray) -> np.ndarray:
    """The number of the lowest bit that is set."""
    return np.round(np.log2(np.maximum(mask & -mask, 1))).astype(np.int64)


def _bit_positions(mask: int) -> np.ndarray:
    return np.array([bit for bit in range(mask.bit_length()) if mask >> bit & 1], dtype=np.int64)
