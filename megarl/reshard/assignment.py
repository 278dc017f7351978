"""Who sends what to whom: exactly what a rank needs and does not have, from the owners that are busy least.

Every rank computes the same assignment from the configuration alone, in whole numbers, so that no rank tells another.
A node gets what several of its ranks need once, in parts, one at each of them (its entries), and they forward these
parts to each other. All layers of a kind on a stage are assigned alike, so each of them is balanced by itself.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from megarl.config import ConfigError
from megarl.models.cuts import HFConfig
from megarl.reshard.flows import Kind, Line, Wire, kinds_of, line_of
from megarl.reshard.layout import EngineLayout, TrainLayout
from megarl.reshard.sharing import Sets, balance, deal_far, deal_within, gather, hand_out
from megarl.reshard.sides import sides_of

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
