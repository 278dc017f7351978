"""Device abstraction: the only module that checks for a GPU. All others ask it."""

from __future__ import annotations

import os
import resource
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch
import torch.cuda.nvtx
import torch.cuda.profiler

from megarl.parallel import shared_memory

_HAS_CUDA = torch.cuda.is_available()  # checked once, before torch.cuda is patched


def has_cuda() -> bool:
    return _HAS_CUDA


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if _HAS_CUDA else torch.device("cpu")


def gpu_names() -> list[str]:
    """Return the GPUs of this machine with their memory; empty without a GPU."""
    if not _HAS_CUDA:
        return []
    properties = [torch.cuda.get_device_properties(number) for number in range(count())]
    return [f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB)" for gpu in properties]


def count() -> int:
    """Return the number of GPUs of this machine."""
    return torch.cuda.device_count() if _HAS_CUDA else 0


def memory_bytes(num_ranks: int) -> int:
    """Return the bytes of memory of the smallest device of `num_ranks` ranks on this machine.

    Without a GPU an equal part of the host's memory, or of what its cgroup may use.
    """
    if _HAS_CUDA:
        return min(torch.cuda.get_device_properties(number).total_memory for number in range(min(num_ranks, count())))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no cgroup, or no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // num_ranks


def backend() -> str:
    """Return the torch.distributed backend; with CUDA, host tensors still use gloo."""
    return "cpu:gloo,cuda:nccl" if _HAS_CUDA else "gloo"


def set_device() -> None:
    """Bind this process to its device."""
    if _HAS_CUDA:
        torch.cuda.set_device(device())


def synchronize(tensor: torch.Tensor, whole: bool = False) -> None:
    """Wait for queued work on the tensor's device, before another process, which has its own queues, reads its memory.

    Waits for this thread's current stream, or with `whole` for all streams of this process. Returns at once for a host
    tensor. Raises errors of the queued work.
    """
    if tensor.is_cuda and whole:
        torch.cuda.synchronize(tensor.device)
    elif tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def allocate_shared(size: int, number: int | None = None) -> torch.Tensor:
    """Allocate [size] uint8 in memory that another process of the machine can open.

    number: which of the machine's devices; this rank's by default.
    """
    if _HAS_CUDA:
        where = device() if number is None else torch.device("cuda", number)
        return torch.empty(size, dtype=torch.uint8, device=where)
    return shared_memory.empty((size,), torch.uint8)


def empty_cache() -> None:
    """Release cached device memory to other processes."""
    if _HAS_CUDA:
        torch.cuda.empty_cache()


def reserve(size: int) -> None:
    """Allocate and free `size` bytes in one piece, as a check that they are available.

    Raises torch.OutOfMemoryError, or a RuntimeError of the host's allocator.
    """
    torch.empty(size, dtype=torch.uint8, device=device())


def peak_memory_bytes() -> int:
    """Return this process's peak memory in bytes: on the device, or resident on the host without a GPU."""
    if _HAS_CUDA:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_name() -> str:
    """Return CUDA's name of this rank's device; empty without a GPU."""
    return torch.cuda.get_device_name(device()) if _HAS_CUDA else ""


def gpu_load() -> tuple[float, int] | None:
    """Return the device's recent utilization (0 to 1) and its used bytes, by NVML. Never raises.

    None without a GPU or if NVML cannot be queried.
    """
    if not _HAS_CUDA:
        return None
    try:
        return torch.cuda.utilization(device()) / 100, int(torch.cuda.device_memory_used(device()))
    except Exception:  # noqa: BLE001  no pynvml, no permission, driver mismatch: omit the metric
        return None


def profiler_start() -> None:
    """Call cudaProfilerStart, which starts recording under `nsys profile -c cudaProfilerApi`."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()


def profiler_stop() -> None:
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profiler_range(name: str) -> AbstractContextManager[None]:
    """Return an NVTX range of this thread."""
    return torch.cuda.nvtx.range(name)
