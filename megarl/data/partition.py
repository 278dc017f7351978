"""Split items into parts of about equal cost, optionally keeping most items where they are.

Pure: the same arrays give the same parts on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

MAX_KARMARKAR_KARP = 512  # so many items at most are parted by differencing, whose time grows as items times parts
ROUNDS = 32  # of exchanges between parts
BALANCE_TOLERANCE = 1.001  # the costliest part over the mean, from which on nothing more is exchanged
MAX_OFFERS = 8  # items of a part that are looked at in a round


def partition(costs: np.ndarray, bins: int) -> np.ndarray:
    """Which of `bins` parts each item belongs to ([items] int64), so that parts cost about the same.

    costs: [items] float64, all above zero.
    """
    return (
        karmarkar_karp(costs, bins)
        if len(costs) <= MAX_KARMARKAR_KARP
        else exchange_items(costs, greedy(costs, bins), bins)
    )


def karmarkar_karp(costs: np.ndarray, bins: int) -> np.ndarray:
    """By differencing (Karmarkar and Karp 1982): at first each item is a partition of its own, with all of its cost in
    one bin. The two partitions whose bins differ most are joined, the fullest bin of one with the emptiest of the
    other, until one is left. Arguments and result as of `partition`.
    """
    owner = np.zeros(len(costs), dtype=np.int64)
    if not len(costs):
        return owner
    sums: list[np.ndarray] = []  # of each partition's bins, falling
    joined: list[tuple[int, int, np.ndarray]] = []  # two partitions, and which bin of the first each bin came from
    for cost in costs:
        sums.append(np.zeros(bins))
        sums[-1][0] = cost
    heap = [(-float(cost), number) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, a), (_, b) = heapq.heappop(heap), heapq.heappop(heap)
        both = sums[a] + sums[b][::-1]
        order = np.argsort(-both, kind="stable")
        joined.append((a, b, order))
        sums.append(both[order])
        heapq.heappush(heap, (float(sums[-1][-1] - sums[-1][0]), len(sums) - 1))
    # From the last partition back: where each bin of those that it was made of has come to lie.
    place: dict[int, np.ndarray] = {len(sums) - 1: np.arange(bins)}
    for number in range(len(sums) - 1, len(costs) - 1, -1):
        a, b, order = joined[number - len(costs)]
        first = np.empty(bins, dtype=np.int64)
        first[order] = place.pop(number)
        place[a], place[b] = first, first[::-1]
    for item in range(len(costs)):
        owner[item] = place[item][0]
    return owner


def greedy(costs: np.ndarray, bins: int, before: np.ndarray | None = None) -> np.ndarray:
    """The costliest item to the part that has least, until none is left. before: [bins] costs that parts have already.
    Else arguments and result as of `partition`."""
    order = np.argsort(-costs, kind="stable")
    heap = [(load, part) for part, load in enumerate([0.0] * bins if before is None else before.tolist())]
    heapq.heapify(heap)
    chosen = []
    for cost in costs[order].tolist():
        load, part = heap[0]
        chosen.append(part)
        heapq.heapreplace(heap, (load + cost, part))
    owner = np.empty(len(costs), dtype=np.int64)
    owner[order] = chosen
    return owner


def exchange_items(
    costs: np.ndarray, owner: np.ndarray, bins: int, enough: float | None = None, before: np.ndarray | None = None
) -> np.ndarray:
    """`owner` after exchanges that bring parts nearer to each other; no part gets costlier than the costliest was.

    In a round each part of the costlier half meets one of the cheaper half, another one each time, and the two
    exchange an item for an item, or for none, where that lessens the gap between them, so as to lessen it most.

    enough: only parts that cost more than so many times the mean look for an exchange; by default all do. before:
    as of `greedy`.
    """
    owner, half = owner.copy(), bins // 2
    rising = np.argsort(costs, kind="stable")
    for number in range(ROUNDS if half else 0):
        loads = np.bincount(owner, weights=costs, minlength=bins)
        loads = loads if before is None else loads + before
        most = (enough or BALANCE_TOLERANCE) * loads.sum() / bins
        if loads.max() <= most:
            break
        items = rising[np.argsort(owner[rising], kind="stable")]  # of the first part, rising, then of the next
        counts = np.bincount(owner, minlength=bins)
        falling = np.argsort(-loads, kind="stable")
        # At first the costliest meets the cheapest. Later they are turned against each other by the golden ratio,
        # which comes close to no former turn.
        rich, poor = falling[:half], np.roll(falling[::-1][:half], int(number * 0.6180339887 % 1 * half))
        if enough is not None:
            rich, poor = rich[loads[rich] > most], poor[loads[rich] > most]
        gaps = loads[rich] - loads[poor]
        given, prices = _sample_offers(costs, items, counts, rich)
        taken, returns = _sample_offers(costs, items, counts, poor)
        shifts = (prices[:, :, None] - returns[:, None, :]).reshape(len(rich), -1)
        if enough is None:
            lacking, left = gaps, np.abs(gaps[:, None] - 2 * shifts)
        else:  # anything between what is too much and half of the gap
            lacking = np.minimum(loads[rich] - most, gaps / 2)
            left = np.maximum(np.maximum(lacking[:, None] - shifts, shifts - gaps[:, None] / 2), 0.0)
        pairs, best = np.arange(len(rich)), left.argmin(axis=1)
        gain = left[pairs, best] < lacking * (1 - 1e-9)  # not for the sake of rounding
        if enough is None and not gain.any():
            break
        there = np.where(gain, given[pairs, best // taken.shape[1]], -1)
        back = np.where(gain, taken[pairs, best % taken.shape[1]], -1)
        owner[there[there >= 0]] = poor[there >= 0]
        owner[back[back >= 0]] = rich[back >= 0]
    return owner


def _sample_offers(
    costs: np.ndarray, items: np.ndarray, counts: np.ndarray, parts: np.ndarray
) -> tuple[np.ndarray, ...]:
    """What each of `parts` may give: numbers of items and their costs, both [parts, offers].

    Of many items these are some that lie evenly among them. -1 at cost 0 is nothing, first and wherever a part has
    fewer items than another.
    """
    starts, own = (np.cumsum(counts) - counts)[parts][:, None], counts[parts][:, None]
    column = np.arange(min(MAX_OFFERS, int(counts.max())))[None, :]
    step = np.maximum(own / column.shape[1], 1.0)
    nth = (column * step).astype(np.int64)
    offers = np.where(nth < own, items[np.minimum(starts + nth, len(items) - 1)], -1)
    offers = np.concatenate([np.full((len(parts), 1), -1), offers], axis=1)
    return offers, np.where(offers >= 0, costs[offers], 0.0)


TOLERANCES = (1.01, 1.005, 1.002, 1.001)
"""What a part may cost over the mean, one after another. The closer the parts, the more items have to move. Where a
token costs tens of microseconds of a GPU and some tens of bytes to move, one percent is what it may cost to let items
stay, and not more."""
HOLDER_TOLERANCE = 1.004  # within this, holders are balanced before what each holds is cut up


def partition_near_home(
    costs: np.ndarray, sizes: np.ndarray, most: int, home: np.ndarray, holders: int, count: int
) -> Iterator[np.ndarray]:
    """Which of `holders * count` parts each item belongs to ([items] int64), the first `count` parts being the first
    holder's, and so on. There are several, with more and more items away from home; the first is to be taken that will
    do: in which parts cost about the same, and are not larger than `most`.

    costs: [items] float64, all above zero. sizes: [items] int64. home: [items], the holder that has it, below 0 for
    none.

    An item that costs more than a part should is one by itself, and each holder has as many of about the same cost, so
    that their costliest parts are alike. The rest stays with its holder but for what another has too little of, is cut
    up by each holder for itself, and what is then too costly exchanges items with parts of any.
    """
    falling = np.argsort(-costs, kind="stable")
    number = _count_large(costs[falling], holders * count)
    giants, rest = falling[:number], falling[number:]
    owner = np.empty(len(costs), dtype=np.int64)
    holder = _assign_large(costs[giants], home[giants], holders, costs.sum() / holders)
    for one in range(holders):
        mine = giants[holder == one]
        owner[mine] = one * count + np.arange(len(mine))
    left = np.flatnonzero(~np.isin(np.arange(holders * count), owner[giants]))  # the parts that are empty
    within = _balance_holders(costs[rest], home[rest], np.bincount(left // count, minlength=holders))
    part = np.empty(len(rest), dtype=np.int64)  # as an index to `left`
    for one in np.unique(within):
        bins = np.flatnonzero(left // count == one)
        part[within == one] = bins[partition(costs[rest[within == one]], len(bins))]
    room = most * len(left) / max(1, int(sizes[rest].sum()))
    for enough in TOLERANCES:
        part = exchange_items(costs[rest], part, len(left), enough)
        owner[rest] = left[part]
        yield owner.copy()
        # What is too large although it costs no more than others has many small items, and may exchange some of them.
        owner[rest] = left[exchange_items(sizes[rest], part, len(left), room)]
        yield owner.copy()


def _count_large(falling: np.ndarray, parts: int) -> int:
    """How many items are each more, by the first tolerance, than the rest has for each part that is left."""
    first = falling[:parts]
    others = falling.sum() - np.cumsum(first) + first
    alone = first * (parts - np.arange(len(first))) > TOLERANCES[0] * others
    return len(first) if alone.all() else int(alone.argmin())


def _assign_large(falling: np.ndarray, home: np.ndarray, holders: int, whole: float) -> np.ndarray:
    """[giants]: whose each is. No holder has more than one more than another, of any that are alike; one stays at home
    unless its holder would cost half a tolerance of `whole` more than the mean, as if those with one less had it."""
    holder, number, begin = np.full(len(falling), -1, dtype=np.int64), np.zeros(holders, dtype=np.int64), 0
    loads, spare = np.zeros(holders), (TOLERANCES[0] - 1) / 2 * whole
    while begin < len(falling):
        alike = int(np.count_nonzero(falling * TOLERANCES[0] >= falling[begin]))
        end = min(len(falling), max(alike, (begin // holders + 1) * holders))
        most, extra = end // holders, end % holders  # so many holders have one more
        mean = (falling[:end].sum() + -end % holders * falling[end - 1]) / holders
        for item in [i for i in range(begin, end) if home[i] >= 0]:
            at, one_more = home[item], np.count_nonzero(number > most) < extra
            if loads[at] + falling[item] <= mean + spare and number[at] < most + one_more:
                holder[item] = at
                number[at] += 1
                loads[at] += falling[item]
        for item in np.flatnonzero(holder[begin:end] < 0) + begin:
            at = np.lexsort((loads, number))[0]
            holder[item] = at
            number[at] += 1
            loads[at] += falling[item]
        begin = end
    return holder


def _balance_holders(falling: np.ndarray, home: np.ndarray, rooms: np.ndarray) -> np.ndarray:
    """[items]: whose each is. rooms: [holders] for how many parts each has items."""
    if not len(falling):
        return np.empty(0, dtype=np.int64)
    able = np.flatnonzero(rooms)
    place = np.full(len(rooms) + 1, -1)  # among those that are able; -1 at the end, for items without a home
    place[able] = np.arange(len(able))
    at, level = place[home.clip(min=-1)], falling.sum() / rooms.sum()
    before = (rooms.max() - rooms[able]) * level  # as if who has fewer rooms had something in the others
    loads = before + np.bincount(at[at >= 0], weights=falling[at >= 0], minlength=len(able))
    over = (loads - rooms.max() * level).tolist()
    at = at.copy()
    for item, (cost, holder) in enumerate(zip(falling.tolist(), at.tolist(), strict=True)):
        if holder >= 0 and cost <= over[holder]:
            over[holder] -= cost
            at[item] = -1
    loose, loads = at < 0, before + np.bincount(at[at >= 0], weights=falling[at >= 0], minlength=len(able))
    at[loose] = greedy(falling[loose], len(able), loads)
    return able[exchange_items(falling, at, len(able), HOLDER_TOLERANCE, before)]
