"""Device abstraction: the only module that checks for a GPU. All others ask it."""

from __future__ import annotations

import os
import resource
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.cuda.profiler

from megarl.config import ConfigError
from megarl.parallel import shared_memory

_HAS_CUDA = torch.cuda.is_available()  # checked once, before torch.cuda is patched
SHARING_NCCL = (2, 30)
"""The first version of NCCL that lets ranks share a GPU."""
_ranks_per_gpu = 1
"""How many consecutive ranks of this machine share a GPU, as `set_device` was told."""
_is_rehearsal = False


def rehearse() -> None:
    """Act for the rest of this process as on a machine with GPUs, with tensors on `meta`, which have no bytes."""
    global _is_rehearsal
    _is_rehearsal = True


def is_rehearsal() -> bool:
    return _is_rehearsal


def has_cuda() -> bool:
    """Return whether models are built for GPUs: there is one, or `rehearse` was called."""
    return _HAS_CUDA or _is_rehearsal


def device() -> torch.device:
    """Return the device of this rank."""
    if _is_rehearsal:
        return torch.device("meta")
    if not _HAS_CUDA:
        return torch.device("cpu")
    return torch.device("cuda", gpu_number(int(os.environ.get("LOCAL_RANK", "0")), _ranks_per_gpu))


def gpu_number(local_rank: int, ranks_per_gpu: int) -> int:
    """Return the number of the GPU of a rank, on its machine."""
    return local_rank // ranks_per_gpu


def sharing_variables(ranks_per_gpu: int) -> dict[str, str]:
    """Return the environment variables by which NCCL lets ranks share a GPU; none if they do not."""
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if ranks_per_gpu > 1 else {}


def check_sharing(num_ranks: int, num_gpus: int, ranks_per_gpu: int, nccl: tuple[int, ...]) -> None:
    """Raise ConfigError if a machine has too few GPUs for its ranks, or too old an NCCL for several on a GPU.

    nccl: its version.
    """
    needed = gpu_number(num_ranks - 1, ranks_per_gpu) + 1
    if needed > num_gpus:
        raise ConfigError(
            f"{num_ranks} ranks on this machine need {needed} GPUs with parallel.ranks_per_gpu={ranks_per_gpu}, and it "
            f"has {num_gpus}: start fewer (parallel.world_size), or to test a layout let ranks share a GPU by "
            f"parallel.ranks_per_gpu={-(-num_ranks // max(1, num_gpus))}"
        )
    if ranks_per_gpu > 1 and nccl < SHARING_NCCL:
        raise ConfigError(
            f"parallel.ranks_per_gpu={ranks_per_gpu} needs NCCL {'.'.join(map(str, SHARING_NCCL))}, and this is "
            f"{'.'.join(map(str, nccl))}, which refuses two ranks on a GPU: install the version in "
            "launch/constraints-cuda.txt, or set it to 1"
        )


def gpu_names() -> list[str]:
    """Return the GPUs of this machine with their memory; empty without a GPU."""
    if not _HAS_CUDA:
        return []
    properties = [torch.cuda.get_device_properties(number) for number in range(count())]
    return [f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB)" for gpu in properties]


def count() -> int:
    """Return the number of GPUs of this machine."""
    return torch.cuda.device_count() if _HAS_CUDA else 0


def memory_bytes(num_ranks: int, ranks_per_gpu: int = 1) -> int:
    """Return the bytes of memory of a rank, of `num_ranks` on this machine: its part of the smallest of their GPUs.

    Without a GPU an equal part of the host's memory, or of what its cgroup may use.
    """
    if _HAS_CUDA:
        num_gpus = min(gpu_number(num_ranks - 1, ranks_per_gpu) + 1, count())
        sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(num_gpus)]
        return min(sizes) // ranks_per_gpu
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no cgroup, or no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // num_ranks


def backend() -> str:
    """Return the torch.distributed backend; with CUDA, host tensors still use gloo."""
    return "cpu:gloo,cuda:nccl" if _HAS_CUDA else "gloo"


def set_device(ranks_per_gpu: int = 1) -> None:
    """Bind this process to its device, which it shares with others if `ranks_per_gpu` is above 1.

    Raises ConfigError as `check_sharing`.
    """
    global _ranks_per_gpu
    if not _HAS_CUDA:
        return
    num_ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0")) + 1)
    nccl = tuple(torch.cuda.nccl.version()) if ranks_per_gpu > 1 else ()
    check_sharing(num_ranks, count(), ranks_per_gpu, nccl)
    _ranks_per_gpu = ranks_per_gpu
    os.environ |= sharing_variables(ranks_per_gpu)  # before NCCL reads them
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


def make_side_stream() -> torch.cuda.Stream | None:
    """Return a stream for another thread, behind the work queued in this thread's current one; None without a GPU."""
    if not _HAS_CUDA or _is_rehearsal:
        return None
    stream = torch.cuda.Stream(device())
    stream.wait_stream(torch.cuda.current_stream(device()))
    return stream


def allocate_shared(size: int, number: int | None = None) -> torch.Tensor:
    """Allocate [size] uint8 in memory that another process of the machine can open.

    number: which of the machine's devices; this rank's by default.
    """
    if has_cuda():
        where = device() if number is None else torch.device("cuda", number)
        return torch.empty(size, dtype=torch.uint8, device=where)
    return shared_memory.empty((size,), torch.uint8)


def allocate_order(size: int, number: int | None = None) -> torch.Tensor:
    """Allocate as `allocate_shared` does, for orders: in a rehearsal on the host, as they have bytes there, too."""
    if _is_rehearsal:
        return torch.zeros(size, dtype=torch.uint8)
    return allocate_shared(size, number)


def empty_cache() -> None:
    """Release cached device memory to other processes."""
    if _HAS_CUDA and not _is_rehearsal:
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
