"""The reshard's kernels: exactness against torch on the CPU, bit for bit, and speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu.found import CheckResult, make_result
from megarl.models.fp8 import BLOCK, grid_shape
from megarl.reshard.run.copies import Box, pack, pack_fp8, unpack
from megarl.reshard.run.scale_grids import BlockScales

ROWS, COLUMNS = 7168, 2048  # w2 of one expert of DeepSeek-V3
GOALS = {
    "contiguous pack": 0.9,
    "contiguous unpack": None,
    "pack of rows of 128 B": 0.7,
    "pack of rows of 256 B": 0.7,
    "unpack of rows of 128 B": None,
    "unpack of rows of 256 B": None,
    "BF16 to FP8": 0.8,
    "BF16 to FP8, boxes across blocks": None,
}
"""Cases, and for some of them the ratio to reach on an H200."""
ROUNDS = 5


def exact(device: str) -> CheckResult:
    """Pack and unpack boxes of odd offsets and widths, in each dtype of weights."""
    faults, generator = [], torch.Generator().manual_seed(1)
    cases = 0
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        source = torch.randn(257, 389, generator=generator).to(dtype)
        cuts = [(0, 1, 0, 389), (1, 33, 3, 67), (40, 257, 100, 101), (64, 128, 256, 384)]

        def make_boxes(matrix: torch.Tensor, cuts: list[tuple[int, int, int, int]] = cuts) -> tuple[list[Box], int]:
            placed, offset = [], 0
            for top, bottom, left, right in cuts:
                view = matrix[top:bottom, left:right]
                placed.append((view, offset))
                offset += -(-view.numel() * view.element_size() // 16) * 16
            return placed, offset

        expected_boxes, size = make_boxes(source)
        expected = torch.zeros(size, dtype=torch.uint8)
        pack(expected_boxes, expected)
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        pack(make_boxes(source.to(device))[0], buffer)
        if not torch.equal(buffer.cpu(), expected):
            faults.append(f"packed {dtype} differs from the CPU's")
        target = torch.zeros(source.shape, dtype=dtype, device=device)
        unpack(buffer, make_boxes(target)[0])
        for (view, _), (original, _) in zip(make_boxes(target)[0], expected_boxes, strict=True):
            cases += 1
            if not torch.equal(view.cpu(), original):
                faults.append(f"unpacked {dtype} {tuple(view.shape)} differs")
    return make_result(faults, f"{cases} boxes are bit for bit those of the CPU")


def speed(device: str) -> CheckResult:
    """Compare bytes moved per second with those of torch's copy, in turn, and with the goals."""
    rates = measure_rates(gib=2.0, repeats=20)
    ratios = {
        name: statistics.median(rate / copy for rate, copy in zip(rates[name], rates["copy"], strict=True))
        for name in GOALS
    }
    faults = [
        f"{name}: {ratios[name]:.2f} of copy, wanted {goal}"
        for name, goal in GOALS.items()
        if goal and ratios[name] < goal
    ]
    copy = statistics.median(rates["copy"])
    return make_result(faults, f"copy {copy / 1e12:.2f} TB/s; all goals reached", {"copy B/s": copy, **ratios})


def count_cycles(work: Callable[[], Any], repeats: int) -> int:
    """Return clock cycles of the device that last longer than the host needs to enqueue `repeats` calls."""
    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    return int(4e9 * (time.perf_counter() - begin))  # no device's clock is faster than 4 GHz


def time_calls(work: Callable[[], Any], repeats: int, cycles: int) -> float:
    """Return the device's seconds of a call, over `repeats` calls in a row. The device sleeps before them until the
    host has enqueued them all, so that the host's time does not count."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)
    start.record()
    for _ in range(repeats):
        work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000 / repeats


def strips(matrices: list[torch.Tensor], width: int) -> list[Box]:
    """Return boxes of all columns and a fixed number of rows of some matrices, one behind another in the buffer."""
    boxes: list[Box] = []
    for matrix in matrices:
        for strip in matrix.split(width, dim=1):
            boxes.append((strip, len(boxes) * len(matrix) * width * matrix.element_size()))
    return boxes


def make_cases(gib: float, device: str = "cuda") -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return the bytes that a call moves, and the call, by case; "copy" is torch's."""
    count = max(1, int(gib * 2**30) // (ROWS * COLUMNS * 2))
    weights = torch.randn(count, ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
    matrices = list(weights)
    bytes_ = weights.numel() * 2
    buffer = torch.empty(bytes_, dtype=torch.uint8, device=device)
    flat = weights.view(-1).view(torch.uint8)
    boxes = [(matrix, number * ROWS * COLUMNS * 2) for number, matrix in enumerate(matrices)]
    cases: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (2 * bytes_, partial(buffer.copy_, flat)),
        "contiguous pack": (2 * bytes_, partial(pack, boxes, buffer)),
        "contiguous unpack": (2 * bytes_, partial(unpack, buffer, boxes)),
    }
    for width in (128, 256):
        # Use every eighth strip: neighbours would find each other's bytes in the cache.
        cut = [box for number, box in enumerate(strips(matrices, width // 2)) if number % 8 == 0]
        cut = [(view, number * ROWS * width) for number, (view, _) in enumerate(cut)]
        moved = 2 * len(cut) * ROWS * width
        cases[f"pack of rows of {width} B"] = moved, partial(pack, cut, buffer)
        cases[f"unpack of rows of {width} B"] = moved, partial(unpack, buffer, cut)

    grids = [torch.ones(*grid_shape(matrix.shape), device=device) for matrix in matrices]
    halves = [(matrix, number * ROWS * COLUMNS) for number, matrix in enumerate(matrices)]
    scaled = [BlockScales(grid, 0, 0) for grid in grids]
    cases["BF16 to FP8"] = 3 * weights.numel(), partial(pack_fp8, halves, scaled, buffer)
    shift = BLOCK // 2
    halves = [(matrix[shift:-shift], place) for matrix, place in halves]
    scaled = [BlockScales(grid, shift, 0) for grid in grids]
    moved = 3 * sum(view.numel() for view, _ in halves)
    cases["BF16 to FP8, boxes across blocks"] = moved, partial(pack_fp8, halves, scaled, buffer)
    return cases


def measure_rates(gib: float, repeats: int) -> dict[str, list[float]]:
    """Return bytes per second by case, one number for each round."""
    cases = make_cases(gib)
    cycles = {name: count_cycles(work, repeats) for name, (_, work) in cases.items()}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, (moved, work) in cases.items():
            rates[name].append(moved / time_calls(work, repeats, cycles[name]))
    return rates
