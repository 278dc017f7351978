"""Compare the kernels, under Triton's interpreter, with the loops. argv: the number of random cases of each."""

from __future__ import annotations

import random
import sys

import torch
from boxes import random_bits, random_boxes, random_fp8

from megarl.models.fp8 import FP8, block_amax, compute_scales
from megarl.reshard.run import copies, triton_kernels
from megarl.reshard.run.checksum import device_hash
from megarl.reshard.run.scale_grids import BlockScales


def is_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_copies(seed: int) -> None:
    rng = random.Random(f"copies {seed}")
    boxes, size = random_boxes(rng)
    before = random_bits(rng, size)
    expected, result = before.clone(), before.clone()
    copies.pack(boxes, expected)
    triton_kernels.pack(boxes, result)
    assert is_same_bits(result, expected), f"pack, seed {seed}"
    storages = [
        view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0) for view, _ in boxes
    ]
    originals = [storage.clone() for storage in storages]
    triton_kernels.unpack(before, boxes)
    unpacked = [storage.clone() for storage in storages]
    for storage, original in zip(storages, originals, strict=True):
        storage.copy_(original)
    copies.unpack(before, boxes)
    assert all(is_same_bits(a, b) for a, b in zip(unpacked, storages, strict=True)), f"unpack, seed {seed}"


def check_fp8(seed: int) -> None:
    rng = random.Random(f"fp8 {seed}")
    boxes, scaled, size = random_fp8(rng)
    before = random_bits(rng, size)
    expected, result = before.clone(), before.clone()
    copies.pack_fp8(boxes, scaled, expected)
    triton_kernels.pack_fp8(boxes, scaled, result)
    assert is_same_bits(result, expected), f"pack_fp8, seed {seed}"


def check_nonfinite() -> None:
    """In blocks with NaN and infinities, the same elements become NaN."""
    weight = torch.randn(128, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3, 5], weight[7, 130], weight[9, 300] = torch.nan, torch.inf, -torch.inf
    scales = BlockScales(compute_scales(block_amax(weight, 0, 0, (1, 4))), 0, 0)
    buffers = torch.empty(weight.numel(), dtype=torch.uint8), torch.empty(weight.numel(), dtype=torch.uint8)
    copies.pack_fp8([(weight, 0)], [scales], buffers[0])
    triton_kernels.pack_fp8([(weight, 0)], [scales], buffers[1])
    expected, result = (buffer.view(FP8).float() for buffer in buffers)
    assert torch.equal(expected.isnan(), result.isnan())
    assert is_same_bits(expected.nan_to_num(0), result.nan_to_num(0))
    assert expected.isnan().sum() == 128 * 128 + 2


def check_every_rounding() -> None:
    """Check all FP8 codes, midpoints and their neighbours, and values out of range."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])])
    values = torch.cat([values, torch.tensor([449.0, 463.9, 464.0, 464.1, 480.0, 1e9])])
    values = torch.cat([values, -values])[None]
    grid = torch.ones(1, -(-values.numel() // 128))
    buffers = torch.empty(values.numel(), dtype=torch.uint8), torch.empty(values.numel(), dtype=torch.uint8)
    copies.pack_fp8([(values, 0)], [BlockScales(grid, 0, 0)], buffers[0])
    triton_kernels.pack_fp8([(values, 0)], [BlockScales(grid, 0, 0)], buffers[1])
    expected, result = (buffer.view(FP8).float() for buffer in buffers)
    assert torch.equal(expected.isnan(), result.isnan())
    assert is_same_bits(expected.nan_to_num(0), result.nan_to_num(0))


def check_hashes(seed: int) -> None:
    """Check boxes of any dtype and offset, and contiguous, transposed and empty tensors."""
    rng = random.Random(f"hashes {seed}")
    boxes, _ = random_boxes(rng)
    views = [view for view, _ in boxes]
    raw = random_bits(rng, 70_000)
    start = rng.randrange(8)
    views += [views[0].t(), raw[start : start + rng.choice([1, 7, 8, 33_001, 65_536])], raw[:0], raw[:0].view(0, 3)]
    views += [raw[:64].view(torch.int64).view(2, 4)[:, 1:3], raw[:48].view(torch.float32).view(3, 4)[:, 1:2]]
    result, unhashed = triton_kernels.hashes(views)
    assert set(unhashed) <= {len(boxes)}
    for number, (view, value) in enumerate(zip(views, result.tolist(), strict=True)):
        assert value == device_hash(view) or number in unhashed, f"hash of {view.shape}, {view.stride()}, seed {seed}"


def main() -> None:
    for seed in range(int(sys.argv[1])):
        check_copies(seed)
        check_fp8(seed)
        check_hashes(seed)
    check_nonfinite()
    check_every_rounding()
    print("equal")


if __name__ == "__main__":
    main()
