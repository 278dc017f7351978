"""Who sends what to whom: exactly what a rank needs and does not have, from the owners that are busy least.

Every rank computes the same assignment from the configuration alone, in whole numbers, so that no rank tells another.
A node gets what several of its ranks need once, in parts, one at each of them (its entries), and they forward these
parts to each other. All layers of a kind on a stage are assigned alike, so each of them is balanced by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megarl.config import ConfigError
from megarl.models.layout import HFConfig
from megarl.reshard.flows import Kind, Line, Wire, kinds_of, line_of
from megarl.reshard.layout import EngineLayout, TrainLayout

MIN_PIECE = 64 << 10
"""Bytes below which a part of a tensor is not cut any more."""
TRIES = 3
CLOSE = 1.005
"""To have both of the busiest sender's figures low at once, see `_deal_far`: how often to try, and what is enough."""


class Entries(NamedTuple):
    """Bytes [lo, hi) of the line that go from `src` to `dst`, a rank of a node that needs them. Arrays, in one order.

    group: number of (stage, kind); this happens for each of its layers. takers: the ranks of dst's node that need them
    and lack them, dst among them, as bits, the node's first rank being bit 0; dst forwards to the others.
    """

    lo: np.ndarray
    hi: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    group: np.ndarray
    takers: np.ndarray


class Group(NamedTuple):
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
    where a layout does not divide the model, or the world.
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
        if train.world % engine.tp:
            raise ConfigError(f"the engine's tp={engine.tp} does not divide the {train.world} ranks of the job")
        self.hf, self.train, self.engine, self.wire = hf, train, engine, wire
        self.ranks_per_node = min(ranks_per_node, train.world)
        if train.world % self.ranks_per_node or self.ranks_per_node > 63:
            raise ConfigError(
                f"{train.world} ranks are not whole nodes of {ranks_per_node}, or a node has more than 63"
            )
        self.kinds: list[Kind] = kinds_of(hf, train, engine, wire, min_piece)
        self.line: Line = line_of(self.kinds)
        self.groups = self._groups()
        self.entries = self._assign()

    def _groups(self) -> list[Group]:
        found: dict[tuple[int, int], list[int | None]] = {}
        for number, kind in enumerate(self.kinds):
            for stage, layer in kind.layers:
                found.setdefault((stage, number), []).append(layer)
        return [Group(stage, kind, tuple(layers)) for (stage, kind), layers in sorted(found.items())]

    def needs(self, kind: int) -> np.ndarray:
        """[flows of the kind, world] bool."""
        flows = self.kinds[kind].flows
        needs = np.zeros((len(flows), self.engine.tp), dtype=bool)
        for row, flow in zip(needs, flows, strict=True):
            row[list(flow.positions)] = True
        return np.tile(needs, self.train.world // self.engine.tp)

    def holds(self, kind: int) -> np.ndarray:
        """[flows of the kind, ranks of a stage] bool; the same on each stage that has the kind."""
        train = self.train
        local = np.arange(train.stage_ranks)
        ep_rank = local // train.etp % train.ep
        found = np.zeros((len(self.kinds[kind].flows), train.stage_ranks), dtype=bool)
        for row, flow in zip(found, self.kinds[kind].flows, strict=True):
            if flow.ep_rank is None:
                row[:] = np.isin(local % train.tp, flow.parts)
            else:
                row[:] = np.isin(local % train.etp, flow.parts) & (ep_rank == flow.ep_rank)
        return found

    @cached_property
    def tables(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """`needs` and `holds` of each kind."""
        return [(self.needs(kind), self.holds(kind)) for kind in range(len(self.kinds))]

    @cached_property
    def first_flow(self) -> np.ndarray:
        """Number on the line of each kind's first flow."""
        return np.concatenate([[0], np.cumsum([len(kind.flows) for kind in self.kinds])])

    def _assign(self) -> Entries:
        here, world, ranks = self.ranks_per_node, self.train.world, self.train.stage_ranks
        bits = 1 << np.arange(here, dtype=np.int64)
        columns: list[list[np.ndarray]] = [[], [], [], [], [], []]
        patterns: dict[bytes, int] = {}  # of holders within a stage
        members: list[np.ndarray] = []
        for number, group in enumerate(self.groups):
            needs, holds = self.tables[group.kind]
            own = slice(group.stage * ranks, (group.stage + 1) * ranks)
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
            for column, values in zip(
                columns,
                (flow + self.first_flow[group.kind], node, takers[flow, node], near[flow, node], pattern[flow]),
                strict=False,
            ):
                column.append(values)
            columns[5].append(np.full(len(flow), number))
        flow, node, takers, near, pattern, group_of = (np.concatenate(column) for column in columns)
        times = np.array([len(group.layers) for group in self.groups])
        units = _Units(self.line, self.line.flow_start[flow], self.line.flow_start[flow + 1], times[group_of])

        # Entries: the ranks of a node that need it share what comes in.
        received = self._headroom(units, node, takers, near == 0), np.zeros(world, dtype=np.int64)
        units, origin, dst = _share(
            units,
            near > 0,
            np.stack([_ones(takers), node, takers], axis=1),
            lambda inside, key: int(key[1]) * here + _set_bits(int(key[2])),
            lambda inside, sets: _deal(sets, received[inside]),
        )
        # Senders: inside of the node those of its ranks that have it, else all that have it.
        near, pattern, group_of = near[origin], pattern[origin], group_of[origin]
        stage = np.array([group.stage for group in self.groups])[group_of]
        count = np.array([len(ranks_) for ranks_ in members])[pattern]
        forwards = units.weight * (_ones(takers[origin]) - 1)
        sent = np.bincount(dst, forwards, world).astype(np.int64)
        far = near == 0
        keys = np.stack(
            [np.where(far, count, _ones(near)), np.where(far, stage, dst // here), np.where(far, pattern, near)], axis=1
        )
        units, again, src = _share(
            units,
            far,
            keys,
            lambda far, key: (
                int(key[1]) * ranks + members[int(key[2])] if far else int(key[1]) * here + _set_bits(int(key[2]))
            ),
            lambda far, sets: _deal_far(sets, sent) if far else _deal(sets, sent),
        )
        origin, dst = origin[again], dst[again]
        order = np.lexsort((units.lo, src, dst, group_of[again]))
        found = Entries(units.lo, units.hi, src, dst, group_of[again], takers[origin])
        return Entries(*(column[order] for column in found))

    def _headroom(self, units: _Units, node: np.ndarray, takers: np.ndarray, far: np.ndarray) -> np.ndarray:
        """[world] bytes to begin with when a node's ranks share what enters over the network.

        To level what each of them receives would be to no purpose below the level that the busiest node cannot avoid,
        and whoever gets more of what is shared forwards more. So all are taken to have what brings them to that level.
        """
        here, world = self.ranks_per_node, self.train.world
        single = far & (_ones(takers) == 1)
        rank = node * here + np.round(np.log2(np.maximum(takers, 1))).astype(np.int64)
        forced = np.bincount(rank[single], units.weight[single], world).astype(np.int64)
        shared = np.bincount(node[far & ~single], units.weight[far & ~single], world // here).astype(np.int64)
        level = max(int(forced.max()), int((forced.reshape(-1, here).sum(axis=1) + shared).max()) // here)
        return np.maximum(np.repeat(level - shared // here, here) - forced, 0)

    def transfers(self) -> Transfers:
        """Every transfer of a whole push, entries and forwards, all layers together."""
        entries = self.entries
        times = np.array([len(group.layers) for group in self.groups])[entries.group]
        size = (entries.hi - entries.lo) * times
        src, dst, nbytes = [entries.src], [entries.dst], [size]
        for bit in range(self.ranks_per_node):
            taker = entries.dst // self.ranks_per_node * self.ranks_per_node + bit
            takes = (entries.takers >> bit & 1 == 1) & (taker != entries.dst)
            src.append(entries.dst[takes])
            dst.append(taker[takes])
            nbytes.append(size[takes])
        return Transfers(np.concatenate(src), np.concatenate(dst), np.concatenate(nbytes))


class _Units:
    """Bytes [lo, hi) of the line, `times` over (once for each layer); arrays."""

    def __init__(self, line: Line, lo: np.ndarray, hi: np.ndarray, times: np.ndarray) -> None:
        self.line, self.lo, self.hi, self.times = line, lo, hi, times

    def take(self, index: np.ndarray) -> _Units:
        return _Units(self.line, self.lo[index], self.hi[index], self.times[index])

    @property
    def weight(self) -> np.ndarray:
        return (self.hi - self.lo) * self.times


Sets = list[tuple[np.ndarray, int]]
"""Ranks that may take a share of so many bytes, and these bytes."""


def _share(
    units: _Units,
    later: np.ndarray,
    keys: np.ndarray,
    ranks_of: Callable[[bool, np.ndarray], np.ndarray],
    deal: Callable[[bool, Sets], list[np.ndarray]],
) -> tuple[_Units, np.ndarray, np.ndarray]:
    """Deal out units, those with equal keys among the same ranks: first all that are not `later`, then these.

    keys [N, K]: dealt out in rising order. ranks_of(later, key): the ranks. deal(later, sets): bytes of each of a set's
    ranks. Units at the border of two shares are cut. Returns the units, which of the given ones each was, and its rank.
    """
    lo, hi, times, origin, rank = [], [], [], [], []
    for flag in (False, True):
        index = np.nonzero(later == flag)[0]
        if not len(index):
            continue
        index = index[np.lexsort(keys[index].T[::-1])]
        sorted_keys, weight = keys[index], units.weight[index]
        change = np.nonzero((sorted_keys[1:] != sorted_keys[:-1]).any(axis=1))[0] + 1
        starts, ends = np.concatenate([[0], change]), np.concatenate([change, [len(index)]])
        totals = np.add.reduceat(weight, starts)
        sets = [(ranks_of(flag, sorted_keys[at]), int(total)) for at, total in zip(starts, totals, strict=True)]
        for start, end, (ranks, _), share in zip(starts, ends, sets, deal(flag, sets), strict=True):
            part = units.take(index[start:end])
            if len(ranks) == 1:
                pieces = (part.lo, part.hi, np.arange(end - start), np.zeros(end - start, dtype=np.int64))
            else:
                pieces = _cut(part, share)
            lo.append(pieces[0])
            hi.append(pieces[1])
            times.append(part.times[pieces[2]])
            origin.append(index[start:end][pieces[2]])
            rank.append(ranks[pieces[3]])
    if not lo:
        empty = np.zeros(0, dtype=np.int64)
        return units, empty, empty
    done = _Units(units.line, np.concatenate(lo), np.concatenate(hi), np.concatenate(times))
    return done, np.concatenate(origin), np.concatenate(rank)


def _deal(sets: Sets, load: np.ndarray) -> list[np.ndarray]:
    """Each set's bytes among its ranks, so that the busiest is as idle as can be. load [world]: what each has so far;
    counts up. Sets with few ranks should come first, for they have the least choice."""
    shares = []
    for ranks, total in sets:
        share = _level(load[ranks], total) if len(ranks) > 1 else np.array([total])
        load[ranks] += share
        shares.append(share)
    return shares


def _deal_far(sets: Sets, near: np.ndarray) -> list[np.ndarray]:
    """`_deal` of what goes over the network, with a view to what each rank sends inside of its node besides.

    Two things are to be low: what a rank sends over the network, and what it sends in all. Each alone could come down
    to a level, `far` and `whole`, but not always both at once. To have both within a factor z of their levels, no rank
    may get more than z far, nor more than z whole - near: those that send more than z (whole - far) nearby get so much
    less. z is found by trying.
    """
    alone, both = np.zeros_like(near), near.copy()
    _deal(sets, alone)
    _deal(sets, both)
    far, whole = int(alone.max()), int(both.max())
    best: list[np.ndarray] = []
    least, z = np.inf, 1.0
    for _ in range(TRIES):
        handicap = np.maximum(near - int(z * (whole - far)), 0)
        load = handicap.copy()
        shares = _deal(sets, load)
        sent = load - handicap
        z = max(float(sent.max()) / far, float((sent + near).max()) / whole)
        if z < least:
            least, best = z, shares
        if z < CLOSE:
            break
    return best


def _level(load: np.ndarray, total: int) -> np.ndarray:
    """How much each gets of `total` so that the highest of load + share is as low as can be; whole numbers."""
    rising = np.sort(load)
    below = np.cumsum(rising)
    count = np.arange(1, len(load) + 1)
    # With the lowest n filled up to one level, this is the level; right is the last n whose members all lie below it.
    level = (total + below) // count
    n = int(np.nonzero(level >= rising)[0][-1])
    share = np.maximum(level[n] - load, 0)
    share[np.argmin(load)] += total - share.sum()
    return share


def _cut(units: _Units, share: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lay the units on one line and the shares along it -> lo, hi, which unit, whose share."""
    ends = np.cumsum(units.weight)
    begins = ends - units.weight
    borders = np.cumsum(share)
    points = np.unique(np.concatenate([[0], ends, borders]))
    left, right = points[:-1], points[1:]
    unit = np.searchsorted(ends, left, side="right")
    owner = np.minimum(np.searchsorted(borders, left, side="right"), len(share) - 1)

    def place(point: np.ndarray) -> np.ndarray:
        exact = units.lo[unit] + (point - begins[unit]) // units.times[unit]
        inner = np.maximum(units.line.snap(exact), units.lo[unit])
        return np.where(point == begins[unit], units.lo[unit], np.where(point == ends[unit], units.hi[unit], inner))

    lo, hi = place(left), place(right)
    full = hi > lo
    return lo[full], hi[full], unit[full], owner[full]


def _ones(mask: np.ndarray) -> np.ndarray:
    return (
        np.unpackbits(mask.astype(np.int64).view(np.uint8).reshape(len(mask), 8), axis=1).sum(axis=1).astype(np.int64)
    )


def _set_bits(mask: int) -> np.ndarray:
    return np.array([bit for bit in range(mask.bit_length()) if mask >> bit & 1], dtype=np.int64)
