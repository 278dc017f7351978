"""Inputs and constants shared by the packing and hash functions and their Triton kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

Box = tuple[torch.Tensor, int]
"""A view [rows, columns] of any type, the elements of a row adjacent, and the byte of the buffer at which its elements
are, row by row; a multiple of the size of an element."""


class BlockScales(NamedTuple):
    """Where a box that is quantised is in the logical tensor, and the scales of that.

    grid: FP32, of the whole tensor [ceil(R / 128), ceil(C / 128)]. r0, c0: of the box's first element. make: the box is
    made of whole blocks, or what there is of them at the tensor's end; their scales are made from it and written to the
    grid, in the same pass.
    """

    grid: torch.Tensor
    r0: int
    c0: int
    should_compute: bool = False


STEP = -7046029254386353131  # 0x9E3779B97F4A7C15, 2^64 / golden ratio: no two positions in reach get the same offset
MIX = ((30, -4658895280553007687), (27, -7723592293110705685))  # splitmix64: 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
