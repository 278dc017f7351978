"""Time intervals, for `timeline.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

Times = list[tuple[float, float]]
"""Disjoint time intervals in ascending order."""


def union(times: Iterable[tuple[float, float]]) -> Times:
    merged: Times = []
    for begin, end in sorted(times):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def common(one: Times, other: Times) -> Times:
    shared, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            shared.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def without(one: Times, other: Times) -> Times:
    edges = [-math.inf, *chain.from_iterable(other), math.inf]
    return common(one, list(zip(edges[::2], edges[1::2], strict=True)))


def seconds(times: Times) -> float:
    return math.fsum(end - begin for begin, end in times)
