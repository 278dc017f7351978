"""`rehearse.peak_memory` counts what torch's own allocator counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megarl.rehearse.peak_memory import PeakMemory, fuse

pytestmark = pytest.mark.alone


def train(device: str, recompute: bool = False) -> None:
    """Two steps of a small model with attention, whose kernel differs between devices and is therefore left out."""
    with torch.device(device):
        layers = [
            torch.nn.Sequential(
                torch.nn.RMSNorm(64), torch.nn.Linear(64, 256), torch.nn.SiLU(), torch.nn.Linear(256, 64)
            )
            for _ in range(4)
        ]
        head = torch.nn.Linear(64, 1024)
    params = [param for layer in (*layers, head) for param in layer.parameters()]
    optimizer = torch.optim.AdamW(params, foreach=False)
    for _ in range(2):
        x = torch.zeros(512, 64, device=device)
        for layer in layers:

            def residual(x: torch.Tensor, layer: torch.nn.Module = layer) -> torch.Tensor:
                return x + layer(x)

            x = checkpoint(residual, x, use_reentrant=False) if recompute else residual(x)
        functional.cross_entropy(head(x), torch.zeros(512, dtype=torch.int64, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()


def allocator_peak(program: Callable[[], None]) -> int:
    """Return the peak of a program by the events of torch's allocator for CPUs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        program()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("recompute", [False, True])
def test_peak_equals_the_allocators_on_every_device(recompute: bool) -> None:
    expected = allocator_peak(lambda: train("cpu", recompute))
    assert expected > 4_000_000
    for device in ("cpu", "meta"):
        with PeakMemory(device, block=1) as memory:
            train(device, recompute)
        assert abs(memory.peak / expected - 1) < 0.01, (device, memory.peak, expected)
        assert memory.live == 0


def test_counts_storages_once_and_rounds_them_up() -> None:
    with PeakMemory("meta") as memory:
        x = torch.empty(100, device="meta")
        views = [x[:50], x.view(10, 10).T]
        assert memory.live == 512
        torch.empty(100)  # on another device
        del x
        assert memory.live == 512 and len(views) == 2
        del views
    assert memory.live == 0 and memory.peak == 512


def test_counts_storages_that_are_freed_and_come_back() -> None:
    """As when models leave the device: the tensors remain, and their storages become empty."""
    x = torch.empty(1024, device="meta")
    with PeakMemory("meta") as memory:
        memory.track([x])
        assert memory.live == 4096
        x.untyped_storage().resize_(0)
        assert memory.live == 0
        x.untyped_storage().resize_(8192)
        assert memory.live == memory.peak == 8192
    x.untyped_storage().resize_(0)
    assert memory.live == 8192  # no longer counted


def test_peak_of_each_phase() -> None:
    with PeakMemory("meta", block=1) as memory:
        with memory.phase() as first:
            torch.empty(1000, device="meta")
        kept = torch.empty(10, device="meta")
        with memory.phase() as second:
            kept + 1
    assert (first, second, memory.peak) == ([4000], [80], 4000)


def test_leaves_out_intermediate_results_of_fused_functions() -> None:
    def square_twice(x: torch.Tensor) -> torch.Tensor:
        return x.square().square()

    x = torch.empty(1000, device="meta")
    with PeakMemory("meta", block=1) as memory:
        memory.track([x])
        with memory.phase() as fused:
            fuse(square_twice)(x)
        with memory.phase() as eager:
            square_twice(x)
    assert (fused, eager) == ([8000], [12000])


def test_names_what_exists_at_the_peak() -> None:
    with PeakMemory("meta", block=1, records=True) as memory:
        small = [torch.empty(10, device="meta") for _ in range(3)]
        del small[0]
        large = torch.empty(20, 5, dtype=torch.bfloat16, device="meta")
        product = large + 1
        del large, product
        torch.empty(30, device="meta")  # below the peak
    largest = memory.largest(3)
    assert [(item.nbytes, item.count, item.tensor) for item in largest] == [
        (200, 1, "bfloat16 [20, 5]"),
        (200, 1, "bfloat16 [20, 5]"),
        (80, 2, "float32 [10]"),
    ]
    assert sum(item.nbytes for item in largest) == memory.peak == 480
    line = int(largest[1].calls.partition(" < ")[0].removeprefix("tests/rehearse/test_peak_memory.py:"))
    assert "product = large + 1" in Path(__file__).read_text().splitlines()[line - 1]
    assert len(memory.largest(1)) == 1


def test_names_what_has_grown() -> None:
    with PeakMemory("meta", block=1, records=True) as memory:
        kept = []
        for _ in range(2):
            position = memory.position
            buffer = torch.empty(7, device="meta")  # replaced in each round
            kept.append(torch.empty(5, device="meta"))
    (item,) = memory.growth(position, 3)
    assert (item.nbytes, item.count, item.tensor) == (20, 1, "float32 [5]") and len(buffer) == 7
