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
from megarl.reshard.plan.flows import Kind, Line, Wire, kinds_of, line_of
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, sides_of

SWEEPS, SETTLED = 12, 1e-3
"""`balance` takes its sets in turn so often at most, or until none changes by this part of the busiest rank's load."""
NETWORK, NEAR = 1.043, 0.002
CLOSE, TRIES = 1.005, 5
"""Of `deal_far`: how far what goes over the network may rise above its level, and how exactly that is kept; which
factor is as good as one; how often to try."""

Sets = list[tuple[np.ndarray, int]]
"""Ranks that may take a share of so many bytes, and these bytes."""


class Shares(NamedTuple):
    """Bytes [lo, hi) of the line, of the given unit number `origin`, dealt to `rank`; arrays."""

    lo: np.ndarray
    hi: np.ndarray
    origin: np.ndarray
    rank: np.ndarray


def gather(
    keys: np.ndarray, weight: np.ndarray, ranks_of: Callable[[np.ndarray], np.ndarray]
) -> tuple[list[np.ndarray], Sets]:
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


def hand_out(
    line: Line,
    lo: np.ndarray,
    hi: np.ndarray,
    times: np.ndarray,
    members: Sequence[np.ndarray],
    sets: Sets,
    shares: Sequence[np.ndarray],
) -> Shares:
    """Cut units [lo, hi), which weigh `times` their bytes, where one rank's share ends and the next one's begins."""
    found = [Shares(*(np.zeros(0, dtype=np.int64),) * 4)]
    for units, (ranks, _), share in zip(members, sets, shares, strict=True):
        if len(ranks) == 1:
            found.append(Shares(lo[units], hi[units], units, np.full(len(units), ranks[0])))
        else:
            begin, end, unit, owner = _cut(line, lo[units], hi[units], times[units], share)
            found.append(Shares(begin, end, units[unit], ranks[owner]))
    return Shares(*map(np.concatenate, zip(*found, strict=True)))


def deal(sets: Sets, load: np.ndarray) -> list[np.ndarray]:
    """Each set's bytes among its ranks, so that the busiest is as idle as can be. load [world]: what each has so far;
    counts up. Sets with few ranks should come first, for they have the least choice."""
    shares = []
    for ranks, total in sets:
        share = _level(load[ranks], total) if len(ranks) > 1 else np.array([total])
        load[ranks] += share
        shares.append(share)
    return shares


def balance(sets: Sets, load: np.ndarray) -> list[np.ndarray]:
    """`deal`, and then each set in turn again until nothing changes, or SWEEPS times: then no other sharing has a less
    busy busiest rank, however the sets overlap. (Each turn lowers the sum of the squares of all loads; where that is
    least, so is the busiest rank's load.)"""
    shares = deal(sets, load)
    several = [number for number, (ranks, _) in enumerate(sets) if len(ranks) > 1]
    for _ in range(SWEEPS if len(several) > 1 else 0):
        most = 0
        for number in several:
            ranks, total = sets[number]
            rest = load[ranks] - shares[number]
            share = _level(rest, total)
            most = max(most, int(np.abs(share - shares[number]).max()))
            load[ranks] = rest + share
            shares[number] = share
        if most <= SETTLED * load.max():
            break
    return shares


def deal_within(sets: Sets, sent: np.ndarray, room: np.ndarray) -> list[np.ndarray]:
    """`deal` of what the ranks of a set receive in parts and send to each other, so that the busiest sender is as idle
    as can be. sent [world]: what each sends besides; counts up. room [world]: what each may receive, as far as that is
    enough for all; counts down."""
    shares = []
    for ranks, total in sets:
        others = len(ranks) - 1
        share = _level_within(sent[ranks] // others, total, room[ranks]) if others else np.array([total])
        if others:
            sent[ranks] += share * others
            room[ranks] -= share
        shares.append(share)
    return shares


def deal_far(sets: Sets, near: np.ndarray) -> list[np.ndarray]:
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
        shares = deal(sets, load)
        return shares, int((load - handicap).max()), int((load - handicap + near).max())

    low, high = 0, int(near.max())
    best, far, most = dealt(high)
    if most == far:
        return best
    shares, network, whole = dealt(low)
    least = most / whole
    if network <= CLOSE * far or least <= CLOSE:
        return best if least <= CLOSE else shares
    # How much too high the network's factor is, at the low and at the high end.
    wrong = [network / far - 1, 1 - min(least, NETWORK)]
    for _ in range(TRIES):
        free = low + int((high - low) * wrong[0] / (wrong[0] - wrong[1]))
        shares, network, most = dealt(free)
        factors = network / far, most / whole
        if factors[0] <= NETWORK + NEAR and max(factors) < least:
            best, least = shares, max(factors)
        off = factors[0] - min(factors[1], NETWORK)
        if abs(off) <= NEAR:
            break
        if off > 0:  # the other end counts half, or it might stay for ever
            low, wrong = free, [off, wrong[1] / 2]
        else:
            high, wrong = free, [wrong[0] / 2, off]
    return best


def _level_within(load: np.ndarray, total: int, room: np.ndarray) -> np.ndarray:
    """`_level` with no share above `room`. What that leaves goes out in equal parts."""
    room = np.maximum(room, 0)
    if total >= room.sum():
        return room + _level(np.zeros_like(load), total - int(room.sum()))
    share = _level(load, total)
    full = np.zeros(len(load), dtype=bool)
    while (share > room).any():
        full |= share >= room
        share = np.where(full, room, 0)
        share[~full] = _level(load[~full], total - int(share.sum()))
    return share


def _level(load: np.ndarray, total: int) -> np.ndarray:
    """How much each gets of `total` so that the highest of load + share is as low as can be; whole numbers."""
    rising = load.copy()
    rising.sort()
    # With the lowest n filled up to one level, this is the level; right is the last n whose members all lie below it.
    level = (total + rising.cumsum()) // np.arange(1, len(load) + 1)
    share = np.maximum(level[np.count_nonzero(level >= rising) - 1] - load, 0)
    share[load.argmin()] += total - share.sum()
    return share


def _cut(
    line: Line, lo: np.ndarray, hi: np.ndarray, times: np.ndarray, share: np.ndarray
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
        inner = np.maximum(line.snap(exact), lo[unit])
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
    group: np.ndarray
    takers: np.ndarray


class Wants(NamedTuple):
    """Bytes [lo, hi) of the line that ranks of a node need and lack; arrays.

    group: see `Entries`. takers: these ranks, near: those of the node that hold them, both as bits. owners: number of
    the set of ranks that hold them, counted within the stage.
    """

    lo: np.ndarray
    hi: np.ndarray
    group: np.ndarray
    node: np.ndarray
    takers: np.ndarray
    near: np.ndarray
    owners: np.ndarray

    def take(self, chosen: np.ndarray) -> Wants:
        return Wants(*(column[chosen] for column in self))


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
        self.sides = sides_of(train, engine, ranks_per_node)
        self.world, self.ranks_per_node = self.sides.world, self.sides.here
        if self.ranks_per_node > 63:
            raise ConfigError(f"a node of {self.ranks_per_node} ranks: plans are made for 63 at the most")
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
        of_engine = np.zeros((len(flows), self.engine.tp), dtype=bool)
        for row, flow in zip(of_engine, flows, strict=True):
            row[list(flow.positions)] = True
        needs = np.zeros((len(flows), self.world), dtype=bool)
        needs[:, self.sides.engine] = np.tile(of_engine, len(self.sides.engine) // self.engine.tp)
        return needs

    def on_stage(self, stage: int) -> np.ndarray:
        """[ranks of a stage]: the job's numbers of the ranks that have it."""
        width = self.train.stage_ranks
        return self.sides.train[stage * width : (stage + 1) * width]

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
        wants, owners = self._wants()
        far, inside = wants.take(wants.near == 0), wants.take(wants.near > 0)
        # What each would send if nothing that comes over the network were forwarded; then who gets and forwards that.
        sent, over = np.zeros((2, self.world), dtype=np.int64)
        self._copies(inside, sent)
        _, sets = self._owned(far, owners)
        for (ranks, _), share in zip(sets, deal_far(sets, sent.copy()), strict=True):
            over[ranks] += share
        far, far_dst = self._enter(far, sent + over)
        forwarded = self._forwarded(far, far_dst)
        # Where all ranks are on both sides, they have about as much to send over the network; elsewhere who has more of
        # that than others sends less inside of its node.
        besides = np.zeros_like(over) if self.sides.alike else over
        inside, dst = self._pass_on(inside, forwarded + besides)
        # Senders: inside of the node those of its ranks that have it, else all that have it.
        sent = forwarded + self._forwarded(inside, dst) + besides
        members, sets = self._in_node(inside, inside.near, self._weight(inside))
        inside, again, src = self._hand_out(inside, members, sets, balance(sets, sent))
        sent -= besides
        members, sets = self._owned(far, owners)
        far, far_again, far_src = self._hand_out(far, members, sets, deal_far(sets, sent))
        both = Wants(*map(np.concatenate, zip(inside, far, strict=True)))
        src, dst = np.concatenate([src, far_src]), np.concatenate([dst[again], far_dst[far_again]])
        order = np.lexsort((both.lo, src, dst, both.group))
        found = Entries(both.lo, both.hi, src, dst, both.group, both.takers)
        return Entries(*(column[order] for column in found))

    def _wants(self) -> tuple[Wants, list[np.ndarray]]:
        """All that any node lacks; and the sets of ranks within a stage that `Wants.owners` counts."""
        here, world = self.ranks_per_node, self.world
        bits = 1 << np.arange(here, dtype=np.int64)
        patterns: dict[bytes, int] = {}
        members: list[np.ndarray] = []
        found = []
        for number, group in enumerate(self.groups):
            needs, holds = self.tables[group.kind]
            own = self.on_stage(group.stage)
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
            start = self.line.flow_start
            at = flow + self.first_flow[group.kind]
            who = takers[flow, node], near[flow, node], pattern[flow]
            found.append(Wants(start[at], start[at + 1], np.full(len(flow), number), node, *who))
        return Wants(*map(np.concatenate, zip(*found, strict=True))), members

    @cached_property
    def _times(self) -> np.ndarray:
        """Layers of each group."""
        return np.array([len(group.layers) for group in self.groups])

    def _weight(self, wants: Wants) -> np.ndarray:
        """Bytes, of all layers."""
        return (wants.hi - wants.lo) * self._times[wants.group]

    def _owned(self, far: Wants, owners: list[np.ndarray]) -> tuple[list[np.ndarray], Sets]:
        """To be dealt out among all that hold it: see `gather`."""
        count, stage = np.array([len(ranks) for ranks in owners]), np.array([group.stage for group in self.groups])
        keys = np.stack([count[far.owners], stage[far.group], far.owners], axis=1)
        return gather(keys, self._weight(far), lambda key: self.on_stage(int(key[1]))[owners[int(key[2])]])

    def _in_node(self, wants: Wants, able: np.ndarray, weight: np.ndarray) -> tuple[list[np.ndarray], Sets]:
        """To be dealt out among the ranks of each one's node that `able` has as bits: see `gather`."""
        here = self.ranks_per_node
        keys = np.stack([_ones(able), wants.node, able], axis=1)
        return gather(keys, weight, lambda key: int(key[1]) * here + _set_bits(int(key[2])))

    def _hand_out(
        self, wants: Wants, members: list[np.ndarray], sets: Sets, shares: list[np.ndarray], copies: bool = False
    ) -> tuple[Wants, np.ndarray, np.ndarray]:
        """The wants, cut; which of the given ones each was; and the rank that it was dealt to. copies: what was dealt
        out were all copies but the first."""
        times = self._times[wants.group] * (_ones(wants.takers) - 1 if copies else 1)
        found = hand_out(self.line, wants.lo, wants.hi, times, members, sets, shares)
        cut = wants.take(found.origin)._replace(lo=found.lo, hi=found.hi)
        return cut, found.origin, found.rank

    def _forwarded(self, wants: Wants, dst: np.ndarray) -> np.ndarray:
        """[world] bytes that each rank forwards of what it receives."""
        weight = self._weight(wants) * (_ones(wants.takers) - 1)
        return np.bincount(dst, weight, self.world).astype(np.int64)

    def _enter(self, far: Wants, sent: np.ndarray) -> tuple[Wants, np.ndarray]:
        """The ranks of a node that need it share what comes in: cut, and the rank of each. Who gets more of it forwards
        more, so those get it that send least besides (`sent` [world]; counts up), but nobody so much that it receives
        more over the network than the busiest rank has to anyway."""
        here, world = self.ranks_per_node, self.world
        weight, single = self._weight(far), _ones(far.takers) == 1
        received = np.bincount(far.node[single] * here + _lowest(far.takers[single]), weight[single], world)
        shared = np.bincount(far.node[~single], weight[~single], world // here)
        able = np.bincount(self.sides.engine // here, minlength=world // here)  # ranks of a node that need anything
        most = max(received.max(), ((received.reshape(-1, here).sum(axis=1) + shared) // np.maximum(able, 1)).max())
        members, sets = self._in_node(far, far.takers, weight)
        far, _, dst = self._hand_out(far, members, sets, deal_within(sets, sent, (most - received).astype(np.int64)))
        return far, dst

    def _copies(self, inside: Wants, sent: np.ndarray) -> tuple[list[np.ndarray], Sets, list[np.ndarray]]:
        """Of what a node has and others of its ranks need, one copy comes from a holder, the rest from holders or from
        those that got one: this rest, as it is gathered and dealt. Of what one rank needs, no rest, dealt to that rank.
        sent [world]: what each sends besides; counts up."""
        copies = _ones(inside.takers) - 1
        _, first = self._in_node(inside, inside.near, self._weight(inside))
        able = inside.takers | np.where(copies > 0, inside.near, 0)
        members, sets = self._in_node(inside, able, self._weight(inside) * copies)
        return members, sets, balance(first + sets, sent)[len(first) :]

    def _pass_on(self, inside: Wants, sent: np.ndarray) -> tuple[Wants, np.ndarray]:
        """What a node has: cut, and the rank that is to receive each. Who makes copies of what it gets forwards them to
        the others; a holder that makes copies sends them, each an entry of its own."""
        here = self.ranks_per_node
        inside, _, rank = self._hand_out(inside, *self._copies(inside, sent), copies=True)
        bit = 1 << rank % here
        forwards = inside.takers & bit > 0
        found, dst = [inside.take(forwards)], [rank[forwards]]
        for place in range(here):
            takes = ~forwards & (inside.takers >> place & 1 == 1)
            one = inside.take(takes)
            found.append(one._replace(takers=np.full(len(one.lo), 1 << place), near=bit[takes]))
            dst.append(one.node * here + place)
        return Wants(*map(np.concatenate, zip(*found, strict=True))), np.concatenate(dst)

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


def _ones(mask: np.ndarray) -> np.ndarray:
    return (
        np.unpackbits(mask.astype(np.int64).view(np.uint8).reshape(len(mask), 8), axis=1).sum(axis=1).astype(np.int64)
    )


def _lowest(mask: np.ndarray) -> np.ndarray:
    """The number of the lowest bit that is set."""
    return np.round(np.log2(np.maximum(mask & -mask, 1))).astype(np.int64)


def _set_bits(mask: int) -> np.ndarray:
    return np.array([bit for bit in range(mask.bit_length()) if mask >> bit & 1], dtype=np.int64)
