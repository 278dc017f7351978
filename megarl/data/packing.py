"""Which sequence goes to which data-parallel rank and into which micro-batch. Pure: lists in and out.

Plans are the same on every rank, because every rank computes them from the same lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def plan_micro_batches(
    lengths: Sequence[int],
    dp: int,
    token_budget: int,
    quadratic: float = 0.0,
    multiple: int = 1,
    together: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Share out sequences over `dp` ranks and into micro-batches of at most `token_budget` tokens.

    quadratic: a sequence of n tokens is taken to cost n + quadratic * n^2, see `models.cost.quadratic_cost`. Micro-
    batches cost about the same, those that ranks compute at the same time most of all, and so do whole ranks.
    together: a number for each sequence; those of the same number are not parted. Everything below that is said of a
    sequence is then said of all that have one number.

    Returns `plan[rank][micro_batch] -> sequence indices`, ascending within a micro-batch. Every rank gets the same
    number of micro-batches, a multiple of `multiple`, because a collective of expert or pipeline parallelism needs all
    its ranks; a rank that has less to do gets empty ones. A sequence longer than the budget is a micro-batch of its
    own. The most expensive micro-batches come first.
    """
    if dp < 1 or token_budget < 1:
        raise ValueError(f"dp and token_budget must be at least 1, not {dp} and {token_budget}")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has {length} tokens; a sequence has at least one")
    units: dict[int, list[int]] = {}
    for index, number in enumerate(range(len(lengths)) if together is None else together):
        units.setdefault(number, []).append(index)
    members = list(units.values())
    costs = np.array([sum(lengths[i] + quadratic * lengths[i] ** 2 for i in unit) for unit in members])
    lengths = [sum(lengths[i] for i in unit) for unit in members]
    short = [n for n in lengths if n <= token_budget]
    fewest = len(lengths) - len(short) + -(-sum(short) // token_budget)  # no plan has fewer micro-batches
    count = max(1, -(-fewest // (dp * multiple))) * multiple
    while True:
        parts = partition(costs, dp * count)
        if all(len(part) <= 1 or sum(lengths[index] for index in part) <= token_budget for part in parts):
            break
        count += multiple  # ends at the latest when each sequence has a micro-batch of its own
    parts.sort(key=lambda part: (-costs[part].sum(), part))
    plan: list[list[list[int]]] = [[] for _ in range(dp)]
    loads = [0.0] * dp
    for first in range(0, len(parts), dp):
        idlest = sorted(range(dp), key=lambda rank: (loads[rank], rank))
        for rank, part in zip(idlest, parts[first : first + dp], strict=True):
            plan[rank].append(sorted(index for unit in part for index in members[unit]))
            loads[rank] += float(costs[part].sum())
    return plan


def partition(costs: np.ndarray, bins: int) -> list[list[int]]:
    """Numbers of the items in each of `bins` parts of about equal cost; numbers rise within a part.

    By differencing (Karmarkar and Karp 1982): at first each item is a partition of its own, with all of its cost in one
    bin. The two partitions whose bins differ most are joined, the fullest bin of one with the emptiest of the other,
    until one is left.
    """
    parts: list[list[int]] = [[] for _ in range(bins)]
    if not len(costs):
        return parts
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
        parts[place[item][0]].append(item)
    return parts
