"""Split row-major runs of a tensor's elements into rectangular boxes, the unit of distributed checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of a tensor that is a contiguous run of its elements."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Split the elements [start, stop) of a tensor, in row-major order, into consecutive boxes.

    There are at most 2 len(shape) - 1 of them.

    >>> [(*box,) for box in boxes((3, 4), 2, 12)]
    [((0, 2), (1, 2)), ((1, 0), (2, 4))]
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = prod(shape[1:])

    def within(number: int, first: int, last: int) -> Iterator[Box]:
        for offset, sizes in boxes(shape[1:], first, last):
            yield Box((number, *offset), (1, *sizes))

    if start % row:
        row_end = min(stop, start - start % row + row)
        yield from within(start // row, start % row, row_end - start + start % row)
        start = row_end
    if (rows := stop // row - start // row) > 0:
        yield Box((start // row, *[0] * (len(shape) - 1)), (rows, *shape[1:]))
        start += rows * row
    if start < stop:
        yield from within(start // row, 0, stop - start)
