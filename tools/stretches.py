"""Time intervals, for `timeline.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

Times = list[tuple[float, float]]
"""Disjoint time intervals in ascending order."""


def union(times: Iterable[tuple[float, float]]) -> Times:
    found: Times = []
    for begin, end in sorted(times):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(one: Times, other: Times) -> Times:
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: Times, other: Times) -> Times:
    edges = [-math.inf, *chain.from_iterable(other), math.inf]
    return common(one, list(zip(edges[::2], edges[1::2], strict=True)))


def seconds(times: Times) -> float:
    return math.fsum(end - begin for begin, end in times)
