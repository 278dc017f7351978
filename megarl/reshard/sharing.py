"""Dealing bytes out to ranks so that the busiest is as idle as can be, and cutting the line of bytes accordingly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megarl.reshard.flows import Line

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
