"""torch_memory_saver: paused memory is free for others, and resumed memory is at the same address."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from gpu.found import CheckResult, make_result

GIB = 1 << 30


def pause(device: str) -> CheckResult:
    """Measure in a process started as the saver requires: with its library loaded first."""
    import torch_memory_saver

    with torch_memory_saver.configure_subprocess():
        command = [sys.executable, "-m", "gpu.saver"]
        # The library is loaded before torch, so the loader has to find the CUDA runtime that torch would bring.
        folders = [*_cuda_runtime_folders(), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        env = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)}
        process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    if process.returncode:
        return CheckResult("failed", (process.stderr.strip().splitlines() or ["no output"])[-1][:300])
    free, lost, same, content = process.stdout.split()[-4:]
    faults = []
    if int(lost) < 0.9 * GIB:
        faults.append(
            f"pausing 1 GiB freed {int(lost) / GIB:.2f} GiB of the whole GPU: if other processes use it, they may have "
            "taken the rest meanwhile; run it again alone"
        )
    if same != "True":
        faults.append("the tensor has another address when it is back")
    if content != "True":
        faults.append("what was backed up on the host is not what came back")
    return make_result(faults, f"pausing 1 GiB freed {int(lost) / GIB:.2f} GiB of {int(free) / GIB:.0f} GiB free")


def _cuda_runtime_folders() -> list[str]:
    """Return the folder of the CUDA runtime that this process has loaded with torch."""
    paths = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcudart" in line]
    return [str(Path(path).parent) for path in paths[:1]]


def _measure() -> None:
    from torch_memory_saver import torch_memory_saver as memory

    with memory.region(tag="weights", enable_cpu_backup=True):
        tensor = torch.full((GIB,), 7, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info()[0]
    memory.pause("weights")
    freed = torch.cuda.mem_get_info()[0] - free_before
    memory.resume("weights")
    print(free_before, freed, tensor.data_ptr() == address, bool((tensor == 7).all()))


if __name__ == "__main__":
    _measure()
