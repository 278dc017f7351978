"""Decide who sends what to whom: exactly what a rank needs and lacks, from the least busy owners.

Every rank computes the same assignment from the configuration alone, in integers. What several ranks of a node need
enters the node once, split into parts: each of these ranks receives its entries and forwards them to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megarl.config import ConfigError
from megarl.models.layout_algebra import HFConfig
from megarl.models.registry import family_of
from megarl.reshard.plan.cells import ByteIndex, LayerTable, build_byte_index, list_layer_kinds
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, Wire, build_rank_map

SWEEPS, SWEEP_TOLERANCE = 12, 1e-3
"""`balance` sweeps over its sets at most `SWEEPS` times, or until no share changes by more than this fraction of the
busiest rank's load."""
NETWORK_LIMIT, NETWORK_TOLERANCE = 1.043, 0.002
GOOD_ENOUGH, TRIES = 1.005, 5
"""Constants of `distribute_network`: the factor by which the network load may exceed its level, and the tolerance of
that; the factor that counts as 1; the number of search steps."""

RankSets = list[tuple[np.ndarray, int]]
"""(ranks, bytes): the ranks that may take a share of these bytes."""


def group_units(
    keys: np.ndarray, weight: np.ndarray, ranks_of: Callable[[np.ndarray], np.ndarray]
) -> tuple[list[np.ndarray], RankSets]:
    """Group units with equal keys, which are divided among the same ranks. Returns the unit numbers and the rank set of
    each group, by ascending key.

    keys [N, K]; weight [N]: bytes; ranks_of(key): the ranks.
    """
    if not len(keys):
        return [], []
    order = np.lexsort(keys.T[::-1])
    sorted_keys = keys[order]
    starts = np.concatenate([[0], np.nonzero((sorted_keys[1:] != sorted_keys[:-1]).any(axis=1))[0] + 1])
    totals = np.add.reduceat(weight[order], starts).tolist()
    sets = [(ranks_of(sorted_keys[start]), total) for start, total in zip(starts, totals, strict=True)]
    return np.split(order, starts[1:]), sets


def distribute(sets: RankSets, load: np.ndarray) -> list[np.ndarray]:
    """Divide each set's bytes among its ranks, so that the busiest rank has as little as possible.

    load [world]: current load of each rank; updated in place. Sets with few ranks should come first, for they have the
    least choice.
    """
    shares = []
    for ranks, total in sets:
        share = _water_fill(load[ranks], total) if len(ranks) > 1 else np.array([total])
        load[ranks] += share
        shares.append(share)
    return shares


def balance(sets: RankSets, load: np.ndarray) -> list[np.ndarray]:
    """Run `distribute`, then redistribute each set in turn until nothing changes, at most SWEEPS times.

    At convergence no other division has a less busy busiest rank, however the sets overlap: each turn lowers the sum of
    the squares of all loads, and where that is minimal, so is the maximum load.
    """
    shares = distribute(sets, load)
    shared_sets = [number for number, (ranks, _) in enumerate(sets) if len(ranks) > 1]
    for _ in range(SWEEPS if len(shared_sets) > 1 else 0):
        max_change = 0
        for number in shared_sets:
            ranks, total = sets[number]
            other_load = load[ranks] - shares[number]
            share = _water_fill(other_load, total)
            max_change = max(max_change, int(np.abs(share - shares[number]).max()))
            load[ranks] = other_load + share
            shares[number] = share
        if max_change <= SWEEP_TOLERANCE * load.max():
            break
    return shares


def distribute_forwarded(sets: RankSets, sent: np.ndarray, capacity: np.ndarray) -> list[np.ndarray]:
    """Distribute what the ranks of a set receive in parts and forward to each other, so that the busiest sender has as
    little as possible.

    sent [world]: what each rank sends otherwise. capacity [world]: what each may receive, as far as that suffices for
    all. Both are updated in place.
    """
    shares = []
    for ranks, total in sets:
        others = len(ranks) - 1
        share = _water_fill_capped(sent[ranks] // others, total, capacity[ranks]) if others else np.array([total])
        if others:
            sent[ranks] += share * others
            capacity[ranks] -= share
        shares.append(share)
    return shares


def distribute_network(sets: RankSets, intranode: np.ndarray) -> list[np.ndarray]:
    """Distribute what goes over the network, considering what each rank sends inside of its node (`intranode`).

    Two quantities should be low: what the busiest rank sends over the network, and what it sends in total. Each has a
    minimal level, but often both cannot reach it at once. Ranks are treated as if they had already sent max(intranode -
    free, 0). With `free` at the maximum of `intranode` this is zero and the network load is balanced; with `free` = 0
    it is all of `intranode` and the total is balanced. In between, this searches for the `free` at which both
    quantities exceed their levels by the same factor. If that factor is above NETWORK_LIMIT, it takes the `free` at
    which the network's factor is NETWORK_LIMIT: the network is the slower link, and a weight sync waits for it.
    """

    def distribute_with(free: int) -> tuple[list[np.ndarray], int, int]:
        handicap = np.maximum(intranode - free, 0)
        load = handicap.copy()
        shares = distribute(sets, load)
        return shares, int((load - handicap).max()), int((load - handicap + intranode).max())

    low, high = 0, int(intranode.max())
    best, network_level, total = distribute_with(high)
    if total == network_level:
        return best
    shares, network, total_level = distribute_with(low)
    best_factor = total / total_level
    if network <= GOOD_ENOUGH * network_level or best_factor <= GOOD_ENOUGH:
        return best if best_factor <= GOOD_ENOUGH else shares
    # Excess of the network's factor over the target, at the low and at the high end.
    errors = [network / network_level - 1, 1 - min(best_factor, NETWORK_LIMIT)]
    for _ in range(TRIES):
        free = low + int((high - low) * errors[0] / (errors[0] - errors[1]))
        shares, network, total = distribute_with(free)
        factors = network / network_level, total / total_level
        if factors[0] <= NETWORK_LIMIT + NETWORK_TOLERANCE and max(factors) < best_factor:
            best, best_factor = shares, max(factors)
        error = factors[0] - min(factors[1], NETWORK_LIMIT)
        if abs(error) <= NETWORK_TOLERANCE:
            break
        if error > 0:  # halve the other end's error, or that end might never move (Illinois method)
            low, errors = free, [error, errors[1] / 2]
        else:
            high, errors = free, [errors[0] / 2, error]
    return best


def _water_fill_capped(load: np.ndarray, total: int, capacity: np.ndarray) -> np.ndarray:
    """`_water_fill` with no share above `capacity`. What exceeds the total capacity is divided equally."""
    capacity = np.maximum(capacity, 0)
    if total >= capacity.sum():
        return capacity + _water_fill(np.zeros_like(load), total - int(capacity.sum()))
    share = _water_fill(load, total)
    is_full = np.zeros(len(load), dtype=bool)
    while (share > capacity).any():
        is_full |= share >= capacity
        share = np.where(is_full, capacity, 0)
        share[~is_full] = _water_fill(load[~is_full], total - int(share.sum()))
    return share


def _water_fill(load: np.ndarray, total: int) -> np.ndarray:
    """Divide `total` so that the maximum of load + share is as low as possible; integers."""
    sorted_load = load.copy()
    sorted_load.sort()
    # level[n - 1]: the common level if the n lowest are filled up. Take the last n whose members all lie below it.
    level = (total + sorted_load.cumsum()) // np.arange(1, len(load) + 1)
    share = np.maximum(level[np.count_nonzero(level >= sorted_load) - 1] - load, 0)
    share[load.argmin()] += total - share.sum()
    return share


def _cut_units(
    byte_index: ByteIndex, lo: np.ndarray, hi: np.ndarray, times: np.ndarray, share: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lay the units end to end with the shares along them. Returns lo, hi, unit index and share index of each part."""
    ends = np.cumsum((hi - lo) * times)
    begins = ends - (hi - lo) * times
    borders = np.cumsum(share)
    points = np.unique(np.concatenate([[0], ends, borders]))
    left, right = points[:-1], points[1:]
    unit = np.searchsorted(ends, left, side="right")
    owner = np.minimum(np.searchsorted(borders, left, side="right"), len(share) - 1)

    def place(point: np.ndarray) -> np.ndarray:
        exact = lo[unit] + (point - begins[unit]) // times[unit]
        inner = np.maximum(byte_index.snap_to_cut(exact), lo[unit])
        return np.where(point == begins[unit], lo[unit], np.where(point == ends[unit], hi[unit], inner))

    begin, end = place(left), place(right)
    is_nonempty = end > begin
    return begin[is_nonempty], end[is_nonempty], unit[is_nonempty], owner[is_nonempty]


MIN_PIECE = 64 << 10
"""Parts of a tensor below this many bytes are not cut further."""


class Entries(NamedTuple):
    """Bytes [lo, hi) of the byte index that go from `src` to `dst`; arrays, sorted by layer_group, dst, src, lo.

    layer_group: number of the (stage, kind); the entry applies to each of its layers. receivers: the ranks of dst's
    node that need and lack the bytes, as bits from the node's first rank on. dst is one and forwards to the others.
    """

    lo: np.ndarray
    hi: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    layer_group: np.ndarray
    receivers: np.ndarray


class NodeDemands(NamedTuple):
    """Bytes [lo, hi) of the byte index that ranks of a node need and lack; arrays.

    layer_group: see `Entries`. receivers: these ranks; local_holders: those of the node that hold the bytes; both as
    bits. holder_set: number of the set of ranks within the stage that hold the bytes.
    """

    lo: np.ndarray
    hi: np.ndarray
    layer_group: np.ndarray
    node: np.ndarray
    receivers: np.ndarray
    local_holders: np.ndarray
    holder_set: np.ndarray

    def select(self, index: np.ndarray) -> NodeDemands:
        return NodeDemands(*(column[index] for column in self))


class LayerGroup(NamedTuple):
    """The layers of one kind on one stage."""

    stage: int
    kind: int
    layers: tuple[int | None, ...]


class Transfers(NamedTuple):
    """Every transfer of a whole weight sync, between any two ranks; arrays."""

    src: np.ndarray
    dst: np.ndarray
    nbytes: np.ndarray


class Assignment:
    """The plan of all ranks, before it is divided into rounds.

    hf: the model. ranks_per_node: rank r is on node r // ranks_per_node. min_piece: see `MIN_PIECE`. table:
    what is moved; all weights by default. Raises ConfigError
    if a layout does not divide the model, or its ranks.
    """

    def __init__(
        self,
        hf: HFConfig,
        train: TrainLayout,
        engine: EngineLayout,
        ranks_per_node: int,
        wire: Wire,
        min_piece: int,
        table: LayerTable | None = None,
    ) -> None:
        self.hf, self.train, self.engine, self.wire = hf, train, engine, wire
        self.rank_map = build_rank_map(train, engine, ranks_per_node)
        self.world, self.ranks_per_node = self.rank_map.world, self.rank_map.ranks_per_node
        if self.ranks_per_node > 63:
            raise ConfigError(f"a node of {self.ranks_per_node} ranks: plans support at most 63")
        self.table: LayerTable = family_of(hf) if table is None else table
        self.layer_kinds = list_layer_kinds(hf, self.table, train, engine, wire, min_piece)
        self.byte_index = build_byte_index(self.layer_kinds)
        layers_of: dict[tuple[int, int], list[int | None]] = {}
        for number, kind in enumerate(self.layer_kinds):
            for stage, layer in kind.layers:
                layers_of.setdefault((stage, number), []).append(layer)
        self.layer_groups = [LayerGroup(*key, tuple(layers)) for key, layers in sorted(layers_of.items())]
        self.entries = self._assign()

    def ranks_on_stage(self, stage: int) -> np.ndarray:
        """Return [ranks of a stage]: the job ranks of the stage."""
        width = self.train.stage_ranks
        return self.rank_map.train[stage * width : (stage + 1) * width]

    @cached_property
    def matrices(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Masks of the ranks that need and of those that hold the cell groups of each kind.

        Shapes [groups, world] and [groups, stage_ranks]; the second is the same on each stage that has the kind.
        """
        train, engine_ranks = self.train, self.rank_map.engine
        local = np.arange(train.stage_ranks)
        ep_rank = local // train.etp % train.ep
        matrices = []
        for kind in self.layer_kinds:
            engine_needs = np.zeros((len(kind.cell_groups), self.engine.tp), dtype=bool)
            holds = np.zeros((len(kind.cell_groups), train.stage_ranks), dtype=bool)
            for engine_row, row, group in zip(engine_needs, holds, kind.cell_groups, strict=True):
                engine_row[list(group.engine_positions)] = True
                if group.ep_rank is None:
                    row[:] = np.isin(local % train.tp, group.train_shards)
                else:
                    row[:] = np.isin(local % train.etp, group.train_shards) & (ep_rank == group.ep_rank)
            needs = np.zeros((len(kind.cell_groups), self.world), dtype=bool)
            needs[:, engine_ranks] = np.tile(engine_needs, len(engine_ranks) // self.engine.tp)
            matrices.append((needs, holds))
        return matrices

    @cached_property
    def first_cell_group(self) -> np.ndarray:
        """Number of each kind's first cell group in the byte index."""
        return np.concatenate([[0], np.cumsum([len(kind.cell_groups) for kind in self.layer_kinds])])

    def _assign(self) -> Entries:
        demands, holder_sets = self._collect_demands()
        remote, local = demands.select(demands.local_holders == 0), demands.select(demands.local_holders > 0)
        # What each rank would send if nothing received over the network were forwarded; then assign who receives and
        # forwards that.
        sent, network_sent = np.zeros((2, self.world), dtype=np.int64)
        self._distribute_copies(local, sent)
        _, sets = self._group_by_holders(remote, holder_sets)
        for (ranks, _), share in zip(sets, distribute_network(sets, sent.copy()), strict=True):
            network_sent[ranks] += share
        remote, remote_dst = self._assign_entry_ranks(remote, sent + network_sent)
        forwarded = self._forwarded_bytes(remote, remote_dst)
        # Colocated ranks send about equal amounts over the network. On separate ranks the amounts differ, so ranks with
        # more network traffic send less inside of their node.
        extra_load = np.zeros_like(network_sent) if self.rank_map.is_colocated else network_sent
        local, dst = self._assign_copy_ranks(local, forwarded + extra_load)
        # Senders: ranks of the node that hold it, if any, else all ranks that hold it.
        sent = forwarded + self._forwarded_bytes(local, dst) + extra_load
        members, sets = self._group_in_node(local, local.local_holders, self._count_bytes(local))
        local, local_units, src = self._cut_demands(local, members, sets, balance(sets, sent))
        sent -= extra_load
        members, sets = self._group_by_holders(remote, holder_sets)
        remote, remote_units, remote_src = self._cut_demands(remote, members, sets, distribute_network(sets, sent))
        both = NodeDemands(*map(np.concatenate, zip(local, remote, strict=True)))
        src, dst = np.concatenate([src, remote_src]), np.concatenate([dst[local_units], remote_dst[remote_units]])
        order = np.lexsort((both.lo, src, dst, both.layer_group))
        entries = Entries(both.lo, both.hi, src, dst, both.layer_group, both.receivers)
        return Entries(*(column[order] for column in entries))

    def _collect_demands(self) -> tuple[NodeDemands, list[np.ndarray]]:
        """Return what any node lacks, and the sets of ranks within a stage that `NodeDemands.holder_set` numbers."""
        ranks_per_node, world = self.ranks_per_node, self.world
        bits = 1 << np.arange(ranks_per_node, dtype=np.int64)
        patterns: dict[bytes, int] = {}
        members: list[np.ndarray] = []
        demands = []
        for number, group in enumerate(self.layer_groups):
            needs, holds = self.matrices[group.kind]
            stage_ranks = self.ranks_on_stage(group.stage)
            lacking = needs.copy()
            lacking[:, stage_ranks] &= ~holds
            receivers = lacking.reshape(len(needs), -1, ranks_per_node) @ bits
            cell_group, node = np.nonzero(receivers)
            holds_by_rank = np.zeros((len(needs), world), dtype=bool)
            holds_by_rank[:, stage_ranks] = holds
            local_holders = holds_by_rank.reshape(len(needs), -1, ranks_per_node) @ bits
            pattern = np.empty(len(holds), dtype=np.int64)
            for row, holders in enumerate(holds):
                key = holders.tobytes()
                if key not in patterns:
                    patterns[key] = len(members)
                    members.append(np.nonzero(holders)[0])
                pattern[row] = patterns[key]
            start = self.byte_index.cell_group_start
            index = cell_group + self.first_cell_group[group.kind]
            columns = receivers[cell_group, node], local_holders[cell_group, node], pattern[cell_group]
            demands.append(
                NodeDemands(start[index], start[index + 1], np.full(len(cell_group), number), node, *columns)
            )
        return NodeDemands(*map(np.concatenate, zip(*demands, strict=True))), members

    @cached_property
    def _layer_counts(self) -> np.ndarray:
        """Number of layers of each layer group."""
        return np.array([len(group.layers) for group in self.layer_groups])

    def _count_bytes(self, demands: NodeDemands) -> np.ndarray:
        """Return bytes, summed over all layers."""
        return (demands.hi - demands.lo) * self._layer_counts[demands.layer_group]

    def _group_by_holders(
        self, demands: NodeDemands, holder_sets: list[np.ndarray]
    ) -> tuple[list[np.ndarray], RankSets]:
        """Group demands to distribute them among all ranks that hold them; see `group_units`."""
        count = np.array([len(ranks) for ranks in holder_sets])
        stage = np.array([group.stage for group in self.layer_groups])
        keys = np.stack([count[demands.holder_set], stage[demands.layer_group], demands.holder_set], axis=1)
        return group_units(
            keys, self._count_bytes(demands), lambda key: self.ranks_on_stage(int(key[1]))[holder_sets[int(key[2])]]
        )

    def _group_in_node(
        self, demands: NodeDemands, candidates: np.ndarray, weight: np.ndarray
    ) -> tuple[list[np.ndarray], RankSets]:
        """Group demands to distribute them among the `candidates`, ranks of their node as bits; see `group_units`."""
        ranks_per_node = self.ranks_per_node
        keys = np.stack([_count_bits(candidates), demands.node, candidates], axis=1)
        return group_units(keys, weight, lambda key: key[1] * ranks_per_node + set_bits(key[2:], ranks_per_node)[0])

    def _cut_demands(
        self,
        demands: NodeDemands,
        members: list[np.ndarray],
        sets: RankSets,
        shares: list[np.ndarray],
        copies: bool = False,
    ) -> tuple[NodeDemands, np.ndarray, np.ndarray]:
        """Return the demands cut by shares, the index of the demand that each part comes from, and the rank it is
        assigned to. copies: all copies but the first were distributed."""
        times = self._layer_counts[demands.layer_group] * (_count_bits(demands.receivers) - 1 if copies else 1)
        parts = [(np.zeros(0, dtype=np.int64),) * 4]
        for units, (ranks, _), share in zip(members, sets, shares, strict=True):
            lo, hi = demands.lo[units], demands.hi[units]
            if len(ranks) == 1:
                parts.append((lo, hi, units, np.full(len(units), ranks[0])))
            else:
                lo, hi, unit, owner = _cut_units(self.byte_index, lo, hi, times[units], share)
                parts.append((lo, hi, units[unit], ranks[owner]))
        lo, hi, unit, rank = map(np.concatenate, zip(*parts, strict=True))
        return demands.select(unit)._replace(lo=lo, hi=hi), unit, rank

    def _forwarded_bytes(self, demands: NodeDemands, dst: np.ndarray) -> np.ndarray:
        """Return [world] bytes that each rank forwards of what it receives."""
        weight = self._count_bytes(demands) * (_count_bits(demands.receivers) - 1)
        return np.bincount(dst, weight, self.world).astype(np.int64)

    def _assign_entry_ranks(self, demands: NodeDemands, sent: np.ndarray) -> tuple[NodeDemands, np.ndarray]:
        """Divide what enters a node among its ranks that need it; return the parts and the rank of each.

        A rank that receives more forwards more. So the ranks that otherwise send least (`sent` [world]; updated in
        place) get it, but none receives more over the network than the busiest rank has to anyway.
        """
        ranks_per_node, world = self.ranks_per_node, self.world
        weight, has_one_receiver = self._count_bytes(demands), _count_bits(demands.receivers) == 1
        position = np.log2(demands.receivers[has_one_receiver]).round().astype(np.int64)  # of the only bit
        receiver = demands.node[has_one_receiver] * ranks_per_node + position
        received = np.bincount(receiver, weight[has_one_receiver], world)
        shared = np.bincount(demands.node[~has_one_receiver], weight[~has_one_receiver], world // ranks_per_node)
        num_receivers = np.bincount(self.rank_map.engine // ranks_per_node, minlength=world // ranks_per_node)
        received_per_node = received.reshape(-1, ranks_per_node).sum(axis=1) + shared
        max_received = max(received.max(), (received_per_node // np.maximum(num_receivers, 1)).max())
        members, sets = self._group_in_node(demands, demands.receivers, weight)
        demands, _, dst = self._cut_demands(
            demands, members, sets, distribute_forwarded(sets, sent, (max_received - received).astype(np.int64))
        )
        return demands, dst

    def _distribute_copies(
        self, demands: NodeDemands, sent: np.ndarray
    ) -> tuple[list[np.ndarray], RankSets, list[np.ndarray]]:
        """Distribute the copies that ranks of a node make of what the node already has.

        One copy comes from a holder. The others come from holders or from ranks that have received one; these others
        are what this returns, grouped and distributed. What only one rank needs has none of these, and is assigned to
        that rank. sent [world]: what each rank sends otherwise; updated in place.
        """
        copies = _count_bits(demands.receivers) - 1
        _, first_copies = self._group_in_node(demands, demands.local_holders, self._count_bytes(demands))
        candidates = demands.receivers | np.where(copies > 0, demands.local_holders, 0)
        members, sets = self._group_in_node(demands, candidates, self._count_bytes(demands) * copies)
        return members, sets, balance(first_copies + sets, sent)[len(first_copies) :]

    def _assign_copy_ranks(self, demands: NodeDemands, sent: np.ndarray) -> tuple[NodeDemands, np.ndarray]:
        """Divide what a node already has; return the parts and the rank that receives each.

        A receiver that makes copies of what it gets forwards them to the others. A holder that makes copies sends them
        itself, each as a separate entry.
        """
        ranks_per_node = self.ranks_per_node
        demands, _, rank = self._cut_demands(demands, *self._distribute_copies(demands, sent), copies=True)
        bit = 1 << rank % ranks_per_node
        forwards = demands.receivers & bit > 0
        position, copy = set_bits(np.where(forwards, 0, demands.receivers), ranks_per_node)
        copies = demands.select(copy)._replace(receivers=1 << position, local_holders=bit[copy])
        both = NodeDemands(*map(np.concatenate, zip(demands.select(forwards), copies, strict=True)))
        return both, np.concatenate([rank[forwards], copies.node * ranks_per_node + position])

    def list_transfers(self) -> Transfers:
        """Return every transfer of a whole weight sync, entries and forwards, all layers together."""
        entries = self.entries
        size = (entries.hi - entries.lo) * self._layer_counts[entries.layer_group]
        node, own_bit = np.divmod(entries.dst, self.ranks_per_node)
        bit, entry = set_bits(entries.receivers & ~(1 << own_bit), self.ranks_per_node)
        return Transfers(
            np.concatenate([entries.src, entries.dst[entry]]),
            np.concatenate([entries.dst, node[entry] * self.ranks_per_node + bit]),
            np.concatenate([size, size[entry]]),
        )


def set_bits(masks: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of each bit below `width` that is set, ascending, and the index of its mask."""
    position, index = np.nonzero(masks >> np.arange(width)[:, None] & 1)
    return position, index


def _count_bits(mask: np.ndarray) -> np.ndarray:
    return np.bitwise_count(mask).astype(np.int64)
