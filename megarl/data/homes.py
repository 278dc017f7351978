"""Items shared out so that most of them stay where they are. Pure, as `partition`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megarl.data.partition import exchanged, greedy, partition

TOLERANCES = (1.01, 1.005, 1.002, 1.001)
"""What a part may cost over the mean, one after another. The closer the parts, the more items have to move. Where a
token costs tens of microseconds of a GPU and some tens of bytes to move, one percent is what it may cost to let items
stay, and not more."""
SETTLED = 1.004  # within this, holders are balanced before what each holds is cut up


def near_home(
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
    number = _giants(costs[falling], holders * count)
    giants, rest = falling[:number], falling[number:]
    owner = np.empty(len(costs), dtype=np.int64)
    holder = _spread(costs[giants], home[giants], holders, costs.sum() / holders)
    for one in range(holders):
        mine = giants[holder == one]
        owner[mine] = one * count + np.arange(len(mine))
    left = np.flatnonzero(~np.isin(np.arange(holders * count), owner[giants]))  # the parts that are empty
    within = _settled(costs[rest], home[rest], np.bincount(left // count, minlength=holders))
    part = np.empty(len(rest), dtype=np.int64)  # as an index to `left`
    for one in np.unique(within):
        bins = np.flatnonzero(left // count == one)
        part[within == one] = bins[partition(costs[rest[within == one]], len(bins))]
    room = most * len(left) / max(1, int(sizes[rest].sum()))
    for enough in TOLERANCES:
        part = exchanged(costs[rest], part, len(left), enough)
        owner[rest] = left[part]
        yield owner.copy()
        # What is too large although it costs no more than others has many small items, and may exchange some of them.
        owner[rest] = left[exchanged(sizes[rest], part, len(left), room)]
        yield owner.copy()


def _giants(falling: np.ndarray, parts: int) -> int:
    """How many items are each more, by the first tolerance, than the rest has for each part that is left."""
    first = falling[:parts]
    others = falling.sum() - np.cumsum(first) + first
    alone = first * (parts - np.arange(len(first))) > TOLERANCES[0] * others
    return len(first) if alone.all() else int(alone.argmin())


def _spread(falling: np.ndarray, home: np.ndarray, holders: int, whole: float) -> np.ndarray:
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


def _settled(falling: np.ndarray, home: np.ndarray, rooms: np.ndarray) -> np.ndarray:
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
    return able[exchanged(falling, at, len(able), SETTLED, before)]
