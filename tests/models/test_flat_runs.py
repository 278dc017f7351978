"""Ranges of a flat tensor as rectangular chunks."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch

from megarl.models.layout_algebra import Chunk, range_chunks

pytestmark = pytest.mark.alone


def test_range_chunks_by_hand() -> None:
    assert list(range_chunks((4, 5), 3, 18)) == [Chunk((0, 3), (1, 2)), Chunk((1, 0), (2, 5)), Chunk((3, 0), (1, 3))]
    assert list(range_chunks((4, 5), 6, 8)) == [Chunk((1, 1), (1, 2))]
    assert list(range_chunks((4, 5), 0, 20)) == [Chunk((0, 0), (4, 5))]
    assert list(range_chunks((), 0, 1)) == [Chunk((), ())]
    assert list(range_chunks((7,), 2, 2)) == []


def test_chunks_concatenate_to_the_range() -> None:
    for shape in ((6,), (1, 4), (3, 4), (2, 3, 2), (2, 1, 3, 2)):
        size = prod(shape)
        full = torch.arange(size).view(shape)
        for begin, stop in itertools.combinations_with_replacement(range(size + 1), 2):
            result = list(range_chunks(shape, begin, stop))
            assert len(result) <= 2 * len(shape) - 1
            parts = [
                full[tuple(slice(low, low + length) for low, length in zip(chunk.offset, chunk.sizes, strict=True))]
                for chunk in result
            ]
            assert [tuple(part.shape) for part in parts] == [chunk.sizes for chunk in result]
            assert [number for part in parts for number in part.reshape(-1).tolist()] == list(range(begin, stop))
