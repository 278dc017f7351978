"""Random boxes of random tensors, for tests of copies."""

from __future__ import annotations

import random

import torch

from megarl.models.fp8 import BLOCK, block_amax, compute_scales, grid_shape
from megarl.reshard.run.copies import Box
from megarl.reshard.run.scale_grids import BlockScales

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8)


def random_bits(rng: random.Random, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


def random_boxes(rng: random.Random, device: str = "cpu") -> tuple[list[Box], int]:
    """Return boxes that do not overlap, in tensors or buffer, and the buffer's size in bytes."""
    boxes: list[Box] = []
    end = 0
    for _ in range(rng.randint(1, 6)):
        dtype = rng.choice(DTYPES)
        rows = rng.choice((1, 2, 7, 64, 130))
        columns = rng.choice((1, 3, 8, 16, 64, 128, 513))
        full = random_bits(rng, rows + rng.randrange(3), columns + rng.choice((0, 0, 1, 8)), dtype=dtype).to(device)
        r0, c0 = rng.randint(0, len(full) - rows), rng.randint(0, full.shape[1] - columns)
        if rng.random() < 0.1:
            rows = 0
        align = rng.choice((dtype.itemsize, 16, 16))
        end = -(-end // align) * align + rng.choice((0, align))
        boxes.append((full[r0 : r0 + rows, c0 : c0 + columns], end))
        end += rows * columns * dtype.itemsize
    rng.shuffle(boxes)
    return boxes, end + rng.randrange(40)


def random_weights(rng: random.Random, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return weights of many magnitudes, with zeros of both signs."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    magnitudes = 10.0 ** torch.randint(-7, 4, grid_shape((rows, columns)), generator=generator)
    scale = magnitudes.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    result = torch.randn(rows, columns, generator=generator) * scale
    result[torch.rand(rows, columns, generator=generator) < 0.05] = rng.choice((0.0, -0.0))
    if rng.random() < 0.3:
        result[:BLOCK, :BLOCK] = 0
    return result.to(dtype)


def random_fp8(rng: random.Random, device: str = "cpu") -> tuple[list[Box], list[BlockScales], int]:
    """Return boxes of matrices, their block scales, and the buffer's size in bytes."""
    boxes: list[Box] = []
    scaled: list[BlockScales] = []
    end = 0
    for _ in range(rng.randint(1, 3)):
        rows, columns = (rng.choice((1, 40, 128, 200, 256, 300)) for _ in range(2))
        full = random_weights(rng, rows, columns, rng.choice((torch.bfloat16, torch.bfloat16, torch.float32)))
        grid = compute_scales(block_amax(full, 0, 0, grid_shape(full.shape)))
        if rng.random() < 0.5:  # whole blocks
            r0, c0 = (rng.randrange(0, n, BLOCK) for n in (rows, columns))
            r1, c1 = (rng.choice((end, min(start + BLOCK, end))) for start, end in ((r0, rows), (c0, columns)))
        else:
            (r0, r1), (c0, c1) = (sorted((rng.randint(0, n), rng.randint(0, n))) for n in (rows, columns))
        end = -(-end // 16) * 16 + rng.choice((0, 0, 5))
        boxes.append((full.to(device)[r0:r1, c0:c1], end))
        scaled.append(BlockScales(grid.to(device), r0, c0))
        end += (r1 - r0) * (c1 - c0)
    return boxes, scaled, end + rng.randrange(40)
