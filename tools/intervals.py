"""Time intervals, for `timeline.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

Intervals = list[tuple[float, float]]
"""Disjoint time intervals in ascending order."""


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def common(first: Intervals, second: Intervals) -> Intervals:
    shared, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            shared.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def without(first: Intervals, second: Intervals) -> Intervals:
    edges = [-math.inf, *chain.from_iterable(second), math.inf]
    return common(first, list(zip(edges[::2], edges[1::2], strict=True)))


def seconds(intervals: Intervals) -> float:
    return math.fsum(end - begin for begin, end in intervals)
