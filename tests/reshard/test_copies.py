"""Packing boxes into buffers and unpacking: loops against plain indexing, kernels against loops, bitwise."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from boxes import random_bits, random_boxes, random_fp8, random_weights

from megarl.models.fp8 import block_amax, compute_scales, grid_shape, quantise
from megarl.reshard.run.copies import pack, pack_fp8, unpack
from megarl.reshard.run.scale_grids import BlockScales

pytestmark = [pytest.mark.alone, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


def to_bytes(view: torch.Tensor) -> bytes:
    return bytes(view.contiguous().view(torch.uint8).flatten().cpu().numpy().tobytes())


@pytest.mark.parametrize("seed", range(60))
def test_pack_and_unpack_round_trip(seed: int) -> None:
    rng = random.Random(f"boxes {seed}")
    boxes, size = random_boxes(rng)
    buffer = random_bits(rng, size)
    expected = bytearray(to_bytes(buffer))
    for view, offset in boxes:
        expected[offset : offset + view.numel() * view.element_size()] = to_bytes(view)
    pack(boxes, buffer)
    assert to_bytes(buffer) == bytes(expected)
    for view, _ in boxes:
        view.untyped_storage().fill_(0)
    unpack(buffer, boxes)
    for view, offset in boxes:
        size = view.numel() * view.element_size()
        assert to_bytes(view) == bytes(expected[offset : offset + size])
        full = view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)
        assert bytes(size) != to_bytes(view) or not size or not any(to_bytes(view))
        assert sum(map(bool, to_bytes(full))) == sum(map(bool, to_bytes(view)))  # nothing outside the box


@pytest.mark.parametrize("seed", range(40))
def test_pack_fp8_matches_quantise(seed: int) -> None:
    rng = random.Random(f"fp8 boxes {seed}")
    boxes, scaled, size = random_fp8(rng)
    buffer = random_bits(rng, size)
    expected = bytearray(to_bytes(buffer))
    pack_fp8(boxes, scaled, buffer)
    for (view, offset), scale in zip(boxes, scaled, strict=True):
        expected[offset : offset + view.numel()] = to_bytes(quantise(view, scale.grid, scale.r0, scale.c0))
    assert to_bytes(buffer) == bytes(expected)


def test_invalid_boxes_raise_before_writing() -> None:
    buffer = torch.zeros(64, dtype=torch.uint8)
    fits = (torch.ones(4, dtype=torch.uint8)[None], 0)
    for box, message in (
        ((torch.ones(1, 9), 32), "bytes 32:68 of a buffer of 64"),
        ((torch.ones(1, 2), 2), "do not fit torch.float32"),
        ((torch.ones(3, 2).T, 0), "adjacent"),
        ((torch.ones(1, 2), -4), "bytes -4:4"),
    ):
        with pytest.raises(ValueError, match=message):
            pack([fits, box], buffer)
        with pytest.raises(ValueError, match=message):
            unpack(buffer, [fits, box])
    weight = torch.ones(4, 4)
    for scale, message in (
        (BlockScales(torch.ones(1, 1), 125, 0), "outside of the grid"),
        (BlockScales(torch.ones(1), 0, 0), "scales are FP32"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_fp8([(weight, 0)], [scale], buffer)
    with pytest.raises(ValueError, match="BF16 or FP32"):
        pack_fp8([(weight.half(), 0)], [BlockScales(torch.ones(1, 1), 0, 0)], buffer)
    assert not buffer.any()


def test_triton_is_not_imported_without_a_gpu() -> None:
    code = "import sys, megarl.reshard.run.executor; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.nightly
def test_interpreted_kernels_match_the_loops() -> None:
    """Runs in a process of its own, because Triton reads TRITON_INTERPRET at import."""
    pytest.importorskip("triton")
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=str(ROOT))
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/reshard/triton_interpreter.py"), "60"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_gpu_kernels_match_the_loops(seed: int) -> None:
    rng = random.Random(f"gpu {seed}")
    boxes, size = random_boxes(rng)
    before = random_bits(rng, size)
    expected, result = before.clone(), before.cuda()
    gpu_boxes = [(_to_gpu(view), offset) for view, offset in boxes]
    pack(boxes, expected)
    pack(gpu_boxes, result)
    assert to_bytes(result) == to_bytes(expected)
    unpack(before, boxes)
    unpack(before.cuda(), gpu_boxes)
    for (view, _), (other, _) in zip(boxes, gpu_boxes, strict=True):
        full, gpu_copies = (
            v.as_strided((v.untyped_storage().nbytes() // v.element_size(),), (1,), 0) for v in (view, other)
        )
        assert to_bytes(full) == to_bytes(gpu_copies)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_gpu_pack_fp8_matches_the_loop(seed: int) -> None:
    rng = random.Random(f"gpu fp8 {seed}")
    boxes, scaled, size = random_fp8(rng)
    buffer = random_bits(rng, size)
    result = buffer.cuda()
    gpu_boxes = [(_to_gpu(view), offset) for view, offset in boxes]
    grids = [BlockScales(scale.grid.cuda(), *scale[1:]) for scale in scaled]
    pack_fp8(gpu_boxes, grids, result)
    pack_fp8(boxes, scaled, buffer)
    assert to_bytes(result) == to_bytes(buffer)


@pytest.mark.gpu
def test_quantisation_is_bitwise_equal_on_gpu() -> None:
    weight = random_weights(random.Random(2), 1000, 1000)
    amax = block_amax(weight, 0, 0, grid_shape(weight.shape))
    assert to_bytes(block_amax(weight.cuda(), 0, 0, grid_shape(weight.shape))) == to_bytes(amax)
    assert to_bytes(compute_scales(amax.cuda())) == to_bytes(compute_scales(amax))
    expected = quantise(weight, compute_scales(amax), 0, 0)
    assert to_bytes(quantise(weight.cuda(), compute_scales(amax).cuda(), 0, 0)) == to_bytes(expected)


def _to_gpu(view: torch.Tensor) -> torch.Tensor:
    """Return the same box of a GPU copy of the whole storage, with the same strides."""
    size = view.untyped_storage().nbytes() // view.element_size()
    full = view.as_strided((size,), (1,), 0).cuda()
    return full.as_strided(view.shape, view.stride(), view.storage_offset())
