"""Speed of the reshard's kernels on a GPU, relative to torch's copy of the same bytes in the same run.

    .venv/bin/python tools/bench_kernels.py [--gib 2] [--repeats 20] [--json]

Prints ratios of bytes moved (read and written) per second to those of a copy. Needs an NVIDIA GPU, and exits with 2
without one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megarl.config import ConfigError
from megarl.config.command_line import Parser, float_in_range, int_in_range, run_cli
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


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the device's seconds of a call: the median of five times `repeats` calls in a row. The device sleeps
    before them until the host has enqueued them all, so that the host's time does not count."""
    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    cycles = int(4e9 * (time.perf_counter() - begin))  # no device's clock is faster than 4 GHz
    times = []
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(repeats):
            work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1000 / repeats)
    return sorted(times)[2]


def strips(matrices: list[torch.Tensor], width: int) -> list[Box]:
    """Return boxes of all columns and a fixed number of rows of some matrices, one behind another in the buffer."""
    boxes: list[Box] = []
    for matrix in matrices:
        for strip in matrix.split(width, dim=1):
            boxes.append((strip, len(boxes) * len(matrix) * width * matrix.element_size()))
    return boxes


def measure(gib: float, repeats: int) -> dict[str, float]:
    """Return bytes per second by case; "copy" is torch's."""
    count = max(1, int(gib * 2**30) // (ROWS * COLUMNS * 2))
    weights = torch.randn(count, ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    matrices = list(weights)
    bytes_ = weights.numel() * 2
    buffer = torch.empty(bytes_, dtype=torch.uint8, device="cuda")
    flat = weights.view(-1).view(torch.uint8)
    rates = {"copy": 2 * bytes_ / seconds(partial(buffer.copy_, flat), repeats)}

    boxes = [(matrix, number * ROWS * COLUMNS * 2) for number, matrix in enumerate(matrices)]
    rates["contiguous pack"] = 2 * bytes_ / seconds(partial(pack, boxes, buffer), repeats)
    rates["contiguous unpack"] = 2 * bytes_ / seconds(partial(unpack, buffer, boxes), repeats)
    for width in (128, 256):
        # Use every eighth strip: neighbours would find each other's bytes in the cache.
        cut = [box for number, box in enumerate(strips(matrices, width // 2)) if number % 8 == 0]
        cut = [(view, number * ROWS * width) for number, (view, _) in enumerate(cut)]
        moved = 2 * len(cut) * ROWS * width
        rates[f"pack of rows of {width} B"] = moved / seconds(partial(pack, cut, buffer), repeats)
        rates[f"unpack of rows of {width} B"] = moved / seconds(partial(unpack, buffer, cut), repeats)

    grids = [torch.ones(*grid_shape(matrix.shape), device="cuda") for matrix in matrices]
    halves = [(matrix, number * ROWS * COLUMNS) for number, matrix in enumerate(matrices)]
    moved = 3 * weights.numel()
    scaled = [BlockScales(grid, 0, 0) for grid in grids]
    rates["BF16 to FP8"] = moved / seconds(partial(pack_fp8, halves, scaled, buffer), repeats)
    shift = BLOCK // 2
    halves = [(matrix[shift:-shift], place) for matrix, place in halves]
    scaled = [BlockScales(grid, shift, 0) for grid in grids]
    moved = 3 * sum(view.numel() for view, _ in halves)
    rates["BF16 to FP8, boxes across blocks"] = moved / seconds(partial(pack_fp8, halves, scaled, buffer), repeats)
    return rates


def show() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--gib", type=float_in_range(most=1024), default=2.0, help="GiB that are copied at a time")
    parser.add_argument("--repeats", type=int_in_range(most=10**6), default=20, help="calls in a row")
    parser.add_argument("--json", action="store_true", help="one object: bytes per second by name")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise ConfigError("bench_kernels.py measures kernels on an NVIDIA GPU; torch sees none here")
    rates = measure(options.gib, options.repeats)
    if options.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), **rates}))
        return 0
    copy = rates["copy"]
    print(f"{torch.cuda.get_device_name()}, torch copy {copy / 1e12:.2f} TB/s (read and written)")
    for name, goal in GOALS.items():
        goal_text = f"  goal {goal}" if goal else ""
        print(f"{name:34} {rates[name] / 1e12:6.2f} TB/s  {rates[name] / copy:5.2f} of copy{goal_text}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(show))
