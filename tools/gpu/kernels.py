"""The reshard's kernels: exactness against torch on the CPU, bit for bit, and speed."""

from __future__ import annotations

import torch

from gpu.found import CheckResult, make_result


def exact(device: str) -> CheckResult:
    """Pack and unpack boxes of odd offsets and widths, in each dtype of weights."""
    from megarl.reshard.run.copies import Box, pack, unpack

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
    """Run `bench_kernels.py` against its goals."""
    from bench_kernels import GOALS, measure

    rates = measure(2.0, 20)
    ratios = {name: rates[name] / rates["copy"] for name in GOALS}
    faults = [
        f"{name}: {ratios[name]:.2f} of copy, wanted {goal}"
        for name, goal in GOALS.items()
        if goal and ratios[name] < goal
    ]
    return make_result(
        faults, f"copy {rates['copy'] / 1e12:.2f} TB/s; all goals reached", {"copy B/s": rates["copy"], **ratios}
    )
