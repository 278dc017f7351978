"""Share a tensor with another process: by CUDA IPC on a GPU, by shared memory on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.multiprocessing as mp

from gpu.found import CheckResult, make_result

SIZE = 1 << 20


def _receive(arriving: Any, leaving: Any) -> None:
    tensor = arriving.get(timeout=60)
    leaving.put(int(tensor.sum()))
    tensor.add_(1)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    leaving.put("written")
    del tensor


def hand_off(device: str) -> CheckResult:
    """Check that the other process reads what was sent, and that its writes are visible here without a copy."""
    context = mp.get_context("spawn")
    arriving, leaving = context.Queue(), context.Queue()
    process = context.Process(target=_receive, args=(arriving, leaving), daemon=True)
    process.start()
    tensor = torch.arange(SIZE, dtype=torch.int64, device=device)
    expected = int(tensor.sum())
    arriving.put(tensor)
    faults = []
    if (read := leaving.get(timeout=90)) != expected:
        faults.append(f"the other process read {read}, not {expected}")
    leaving.get(timeout=60)
    if (actual := int(tensor.sum())) != expected + SIZE:
        faults.append(f"what it wrote is not seen here: {actual}, not {expected + SIZE}")
    process.join(timeout=30)
    if process.exitcode != 0:
        faults.append(f"the other process ended with {process.exitcode}")
    transport = "CUDA IPC" if device == "cuda" else "shared memory"
    return make_result(faults, f"{SIZE * 8 >> 20} MiB read and written through {transport}")
