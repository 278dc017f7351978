"""Inputs and constants shared by the packing and hash functions and their Triton kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

Box = tuple[torch.Tensor, int]
"""(view, offset): a view [rows, columns] of any dtype, with adjacent elements within a row, and the byte offset of
its elements in the buffer, row by row. The offset is a multiple of the element size."""


class BlockScales(NamedTuple):
    """Position of a quantised box in its logical tensor, and that tensor's scales.

    grid: FP32 scales of the whole tensor, [ceil(R / 128), ceil(C / 128)]. r0, c0: position of the box's first element.
    should_compute: compute the scales of the box's blocks and write them to the grid in the same pass. The box must
    then consist of whole blocks, except at the tensor's end.
    """

    grid: torch.Tensor
    r0: int
    c0: int
    should_compute: bool = False


STEP = -7046029254386353131  # 0x9E3779B97F4A7C15, 2^64 / golden ratio: no two positions in range get the same offset
MIX = ((30, -4658895280553007687), (27, -7723592293110705685))  # splitmix64: 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
