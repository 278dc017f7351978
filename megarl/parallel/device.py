"""The device seam: the only place that asks whether this machine has a GPU. Everything else asks here."""

from __future__ import annotations

import os
import resource
from contextlib import AbstractContextManager

import torch
import torch.cuda.nvtx
import torch.cuda.profiler

_HAS_CUDA = torch.cuda.is_available()  # asked once, before anything stands in for torch.cuda


def has_cuda() -> bool:
    return _HAS_CUDA


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if _HAS_CUDA else torch.device("cpu")


def host() -> torch.device:
    """Where what leaves the device goes."""
    return torch.device("cpu")


def gpu_names() -> list[str]:
    """The GPUs of this machine with their memory; none where there is none."""
    if not _HAS_CUDA:
        return []
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [f"{one.name} ({one.total_memory / 1e9:.0f} GB)" for one in found]


def backend() -> str:
    """torch.distributed backend; with CUDA, host tensors still travel by gloo."""
    return "cpu:gloo,cuda:nccl" if _HAS_CUDA else "gloo"


def set_device() -> None:
    """Bind this process to its device."""
    if _HAS_CUDA:
        torch.cuda.set_device(device())


def synchronize(tensor: torch.Tensor, whole: bool = False) -> None:
    """Return when what this thread has had done so far where the tensor is, is done: before another process looks, for
    it has a queue of its own. whole: what anything in this process has had done there. At once for a tensor of the
    host's. Errors of what was queued are raised here."""
    if tensor.is_cuda and whole:
        torch.cuda.synchronize(tensor.device)
    elif tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def empty_cache() -> None:
    """Give freed memory back, so that other processes on the device can have it."""
    if _HAS_CUDA:
        torch.cuda.empty_cache()


def reserve(size: int) -> None:
    """Take so many bytes in one piece and leave them to whoever asks next. Raises what torch raises where there are not
    as many: torch.OutOfMemoryError, or a RuntimeError of the host's allocator."""
    torch.empty(size, dtype=torch.uint8, device=device())


def peak_memory_bytes() -> int:
    """Most memory this process has used: on the device, or resident on the host where there is none."""
    if _HAS_CUDA:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_name() -> str:
    """What CUDA calls this rank's device; empty where there is none."""
    return torch.cuda.get_device_name(device()) if _HAS_CUDA else ""


def gpu_load() -> tuple[float, int] | None:
    """The share of the last moments in which the device was at work, and how many of its bytes are taken, by NVML; None
    where there is no device, or nobody who knows. Never raises."""
    if not _HAS_CUDA:
        return None
    try:
        return torch.cuda.utilization(device()) / 100, int(torch.cuda.device_memory_used(device()))
    except Exception:  # noqa: BLE001  no pynvml, no rights, a driver of another version: a figure less
        return None


def profiler_start() -> None:
    """cudaProfilerStart, from where on `nsys profile -c cudaProfilerApi` records."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()


def profiler_stop() -> None:
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profiler_range(name: str) -> AbstractContextManager[None]:
    """An NVTX range of this thread."""
    return torch.cuda.nvtx.range(name)
