"""Items shared out into parts of about equal cost. Pure: the same arrays give the same parts on every machine."""

from __future__ import annotations

import heapq

import numpy as np

DIFFERENCED = 512  # so many items at most are parted by differencing, whose time grows as items times parts
ROUNDS = 32  # of exchanges between parts
ENOUGH = 1.001  # the costliest part over the mean, from which on nothing more is exchanged
OFFERED = 8  # items of a part that are looked at in a round


def partition(costs: np.ndarray, bins: int) -> np.ndarray:
    """Which of `bins` parts each item belongs to ([items] int64), so that parts cost about the same.

    costs: [items] float64, all above zero.
    """
    return differenced(costs, bins) if len(costs) <= DIFFERENCED else exchanged(costs, greedy(costs, bins), bins)


def differenced(costs: np.ndarray, bins: int) -> np.ndarray:
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


def exchanged(
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
        most = (enough or ENOUGH) * loads.sum() / bins
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
        given, prices = _offers(costs, items, counts, rich)
        taken, returns = _offers(costs, items, counts, poor)
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


def _offers(costs: np.ndarray, items: np.ndarray, counts: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, ...]:
    """What each of `parts` may give: numbers of items and their costs, both [parts, offers].

    Of many items these are some that lie evenly among them. -1 at cost 0 is nothing, first and wherever a part has
    fewer items than another.
    """
    starts, own = (np.cumsum(counts) - counts)[parts][:, None], counts[parts][:, None]
    column = np.arange(min(OFFERED, int(counts.max())))[None, :]
    step = np.maximum(own / column.shape[1], 1.0)
    nth = (column * step).astype(np.int64)
    offers = np.where(nth < own, items[np.minimum(starts + nth, len(items) - 1)], -1)
    offers = np.concatenate([np.full((len(parts), 1), -1), offers], axis=1)
    return offers, np.where(offers >= 0, costs[offers], 0.0)
